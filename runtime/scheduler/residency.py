"""Which adapters should be on the device: asks for copies ahead of need, shares the slots fairly, and lets go of
what nobody wants.
"""

from collections.abc import Callable, Iterator

from .adapter_slots import AdapterSlots
from .waiting import WaitingQueues

DRAINING_SHARE = 4
"""At most one slot in so many (and at least one) is drained at a time: the others go on taking requests, so that the
batch stays full.
"""


class Residency:
    """The policy over `AdapterSlots`, for the waiting adapters in the order of their turns.

    `committed`: the last plan whose results came back, as the scheduler says.
    `patience`: an adapter that finds every slot in use first keeps the adapter that was least recently admitted from
    taking new requests; after that many steps the other's running sequences are to be put back. So every slot changes
    hands at most once in about `patience` steps.
    """

    def __init__(self, num_slots: int, patience: int, asynchronous: bool, waiting: WaitingQueues) -> None:
        self.slots = AdapterSlots(num_slots)
        self.asynchronous = asynchronous
        self.failures = 0
        self._patience = patience
        self._waiting = waiting
        self._loads: list[tuple[int, int]] = []
        self._since: dict[int, int] = {}  # adapters without a slot -> step at which they asked first
        self._retiring: set[int] = set()
        self._retired: list[int] = []
        # (adapter whose sequences are put back, adapter that gets its slot)
        self._vacate: tuple[int, int] | None = None
        self._leaving: tuple[int, int] | None = None
        self._vacated_at = -patience
        self._spared: set[int] = set()
        # arrived and not used yet: if somebody waits for it, it is not given up before, or two could chase each other
        # for ever
        self._fresh: set[int] = set()
        self._draining: set[int] = set()
        self._step = 0
        self.committed = -1
        self._full = False
        self._victims: Iterator[int] | None = None

    def requested(self, number: int) -> None:
        """A request of this adapter has come: unless it is here, it is brought into a slot that nobody needs, else
        into host memory only, at once.
        """
        if not self.asynchronous or number < 0 or self.slots.is_resident(number) or self.slots.is_loading(number):
            return
        spared = {other for other in self.slots.resident if self._waiting.active(other)}
        # else those that wait for a slot come first
        slot = self.slots.begin(number, self.committed, spared) if not self._since else None
        self._loads.append((-1 if slot is None else slot, number))

    # -- one look at the waiting adapters, in the order of their turns ---------------------------------------------

    def begin_pass(self, step: int) -> None:
        """`step`: the number of the plan that is being made."""
        self._step = step
        self._spared = {number for number in self._fresh if self._waiting.active(number)}
        self._draining.clear()
        self._full = self.slots.num_slots == 0
        self._victims = None

    @property
    def wants_more(self) -> bool:
        """Whether looking at further adapters can still start a copy."""
        return not self._full

    def ready(self, number: int) -> bool:
        """Whether a request of this adapter may be admitted now; if the adapter is not resident, what it takes is
        started.
        """
        if number < 0:
            return True
        if self.slots.is_resident(number):
            if self._leaving is not None and self._leaving[0] == number and self._leaving[1] in self._since:
                return False
            self._spared.add(number)
            return number not in self._draining
        if self.slots.is_loading(number):
            return False
        slot = self.slots.begin(number, self.committed, self._spared) if self._victims is None else None
        if slot is None:
            self._wait_for_slot(number)
            return False
        self._since.pop(number, None)
        self._spared.add(number)
        if self._leaving is not None and self._leaving[1] == number:
            self._leaving = None
        self._loads.append((slot, number))
        if self.asynchronous:
            return False
        self._arrive(number)
        return True

    def admitted(self, number: int) -> int:
        """A request that was `ready` is admitted: the slot of its adapter (-1: the base model)."""
        self._fresh.discard(number)
        return self.slots.acquire(number) if number >= 0 else -1

    def loads_of_plan(self) -> list[tuple[int, int]]:
        """The copies that the plan itself has to ask for."""
        return [] if self.asynchronous else self.take_loads()

    def take_vacated(self, got_on: Callable[[int], bool]) -> int | None:
        """The adapter whose sequences are to be put back, if there is one. It waits until the other has its slot.

        `got_on(number)`: whether each of the adapter's running sequences has sampled a token since it was admitted.
        Until then none is put back, or two adapters could take the slot from each other for ever, each before the
        other's prompts are computed.
        """
        vacate, self._vacate = self._vacate, None
        if vacate is None or vacate[1] not in self._since or not got_on(vacate[0]):
            return None
        self._leaving, self._vacated_at = vacate, self._step
        return vacate[0]

    def _wait_for_slot(self, number: int) -> None:
        self._full = True
        since = self._since.setdefault(number, self._step)
        if self._victims is None:  # the first of this pass that finds no slot: nobody after it will
            self._victims = iter(() if self.slots.settling(self.committed) else self.slots.draining_order())
        victim = (
            next(self._victims, None) if len(self._draining) < max(1, self.slots.num_slots // DRAINING_SHARE) else None
        )
        if victim is None:
            return
        self._draining.add(victim)
        interval = max(1, self._patience // self.slots.num_slots)
        if self._step - since >= self._patience and self._step - self._vacated_at >= interval and self._vacate is None:
            self._vacate = (victim, number)

    # -- what becomes of copies and of adapters --------------------------------------------------------------------

    def take_loads(self) -> list[tuple[int, int]]:
        """(slot, number) of the copies to start, slot -1 = into host memory only."""
        loads, self._loads = self._loads, []
        return loads

    def arrived(self, number: int) -> None:
        """A copy is complete."""
        self._arrive(number)
        if not self._waiting.active(number):
            self.unused(number)

    def _arrive(self, number: int) -> None:
        self.slots.arrived(number)
        self._fresh.add(number)
        if self._leaving is not None and self._leaving[0] == number:
            self._leaving = None

    def failed(self, number: int) -> None:
        """A copy could not be made; nobody waits for the adapter any more."""
        self.failures += 1
        self.slots.lost(number)
        self.unused(number)

    def forget_resident(self) -> None:
        """What is in the slots is lost. No sequence runs, and no adapter is on its way."""
        for number in self.slots.resident:
            self.slots.lost(number)

    def retire(self, number: int) -> None:
        """The adapter takes no new requests: when its last one is finished, its slot comes free and it is reported
        by `take_retired`.
        """
        self._retiring.add(number)
        if not self._waiting.active(number):
            self.unused(number)

    def unused(self, number: int) -> None:
        """The adapter's last request is finished."""
        self._since.pop(number, None)
        self._fresh.discard(number)
        # a copy on its way must arrive before its slot is another's
        if number in self._retiring and not self.slots.is_loading(number):
            self._retiring.discard(number)
            self.slots.lost(number)
            self._retired.append(number)

    def take_retired(self) -> list[int]:
        """Retired adapters that nobody uses any more."""
        retired, self._retired = self._retired, []
        return retired
