"""Label values of bounded number: a metric has a series for each, for as long as the process lives."""

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
