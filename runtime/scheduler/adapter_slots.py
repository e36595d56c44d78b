"""Which adapter sits in which slot of the GPU's stacks: a pure bookkeeper, so that it can live in another process
than the tensors.
"""

from collections import OrderedDict


class AdapterSlots:
    """At most `num_slots` adapters (by number) are resident or on their way; an idle one, the least recently admitted
    first, makes room for another.

    A slot is never taken away while running sequences use it, while a plan that used it may still be at work on the
    device, or while its adapter is on its way. Steps: the number of the last plan that was issued, and of the
    last whose results came back.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.admissions = 0
        self.loads = 0
        self.evictions = 0
        self._slot: OrderedDict[int, int] = OrderedDict()  # resident and loading ones, least recently admitted first
        self._loading: set[int] = set()
        self._users: dict[int, int] = {}
        self._used_until: dict[int, int] = {}  # last plan that may use an idle adapter
        # (slot, last plan that may use it)
        self._free: list[tuple[int, int]] = [(slot, -1) for slot in range(num_slots - 1, -1, -1)]

    @property
    def resident(self) -> dict[int, int]:
        """Number -> slot of every adapter that can be used now, least recently admitted first."""
        return {number: slot for number, slot in self._slot.items() if number not in self._loading}

    @property
    def num_loading(self) -> int:
        """Adapters on their way."""
        return len(self._loading)

    def is_resident(self, number: int) -> bool:
        """Whether `acquire` may be called."""
        return number in self._slot and number not in self._loading

    def is_loading(self, number: int) -> bool:
        """Whether the adapter is on its way into a slot."""
        return number in self._loading

    def users(self, number: int) -> int:
        """How many running sequences use an adapter."""
        return self._users.get(number, 0)

    def begin(self, number: int, committed: int, spared: set[int]) -> int | None:
        """Take a slot for an adapter, which then is on its way until `arrived` or `lost`; None if none can be had.

        `committed`: the last plan whose results came back. `spared`: idle adapters whose requests come first.
        """
        slot = next((slot for slot, until in self._free if until <= committed), None)
        if slot is not None:
            self._free = [entry for entry in self._free if entry[0] != slot]
        else:
            victim = next(
                (
                    other
                    for other in self._slot
                    if other not in spared and self._used_until.get(other, -1) <= committed and self._idle(other)
                ),
                None,
            )
            if victim is None:
                return None
            slot = self._drop(victim)
            self.evictions += 1
        self._slot[number] = slot
        self._loading.add(number)
        self.loads += 1
        return slot

    def settling(self, committed: int) -> bool:
        """Whether a slot comes free as soon as the plans at work have come back: no need to drain another."""
        idle = (other for other in self._slot if self._idle(other))
        return any(until > committed for _, until in self._free) or any(
            self._used_until.get(other, -1) > committed for other in idle
        )

    def arrived(self, number: int) -> None:
        """The adapter's copy is complete: it is resident."""
        self._loading.discard(number)

    def lost(self, number: int) -> None:
        """Give up the slot of an adapter that could not be loaded or is not wanted any more.

        Raises ValueError while running sequences use it.
        """
        if self.users(number):
            raise ValueError(
                f"adapter number {number} is used by {self.users(number)} running sequences; wait for them or abort "
                "them"
            )
        if number in self._slot:
            until = self._used_until.get(number, -1)
            self._free.append((self._drop(number), until))

    def acquire(self, number: int) -> int:
        """The slot of a resident adapter, for one more running sequence."""
        self._slot.move_to_end(number)
        self._users[number] = self.users(number) + 1
        self.admissions += 1
        return self._slot[number]

    def release(self, number: int, issued: int) -> None:
        """One running sequence less; the adapter stays resident until its slot is needed.

        `issued`: the last plan that may use it.
        """
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]
        self._used_until[number] = issued

    def draining_order(self) -> list[int]:
        """Adapters in use, least recently admitted first: those to drain when another waits for a slot."""
        return [number for number in self._slot if self.users(number)]

    def _idle(self, number: int) -> bool:
        return not self.users(number) and number not in self._loading

    def _drop(self, number: int) -> int:
        self._loading.discard(number)
        self._used_until.pop(number, None)
        return self._slot.pop(number)
