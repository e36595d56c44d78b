"""Label values of bounded number: a metric has a series for each, for as long as the process lives."""

from prometheus_client import Counter

OTHER = "other"


class Labels:
    """Lets the first `most` different values through; all others become "other"."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        """The label for a value."""
        if value in self._known:
            return value
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value


class Series:
    """A counter's series by their label values, each looked up once: `labels` takes longer than counting does."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self._found: dict[tuple[str, ...], Counter] = {}

    def __call__(self, *values: str) -> Counter:
        """The series with these values."""
        found = self._found.get(values)
        if found is None:
            found = self._found[values] = self.counter.labels(*values)
        return found
