"""Spaces the refusals of an owner, so that a client which ignores Retry-After does not slow others."""

from collections import OrderedDict

PACED_STATUSES = frozenset({401, 403, 404, 421, 429})
"""Refusals that a client can cause without end: it has no limits, or has spent them."""
PER_SECOND = 10
BURST = 10
MAX_SECONDS = 1.0
MAX_OWNERS = 4096


class RefusalPace:
    """Delays refusals beyond `PER_SECOND` of one owner, after a burst of `BURST`, by at most `MAX_SECONDS`."""

    def __init__(self) -> None:
        self._next: OrderedDict[str, float] = OrderedDict()

    def delay(self, owner: str, now: float) -> float:
        """Count a refusal. Returns the seconds to wait before it is sent. `now`: seconds, monotonic."""
        place = max(self._next.get(owner, 0.0), now) + 1 / PER_SECOND
        place = min(place, now + MAX_SECONDS + BURST / PER_SECOND)
        self._next[owner] = place
        self._next.move_to_end(owner)
        if len(self._next) > MAX_OWNERS:
            self._next.popitem(last=False)
        return max(0.0, place - now - BURST / PER_SECOND)
