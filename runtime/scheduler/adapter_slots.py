"""Adapter slots on the device: loading ahead of need, LRU eviction, fair sharing, and removal of unused adapters.

Bookkeeping only; the tensors may belong to another process. Adapters are identified by number, -1 = the base model.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from .sequence import Sequence, Status
from .waiting_queue import WaitingQueues

MAX_OVERTAKING_LOADS = 2
"""Loads in the order of the turns, after which the next slot is for the oldest waiting request (`AdapterResidency`)."""
DRAINING_SHARE = 4
"""At most 1 / DRAINING_SHARE of the slots, and at least one, are drained at a time, so that the batch stays full."""


class AdapterSlots:
    """At most `num_slots` adapters are resident or loading. The least recently admitted idle one is evicted.

    A slot is not reused while running sequences use it, while a plan in flight may use it, or while its adapter is
    loading. `committed` and `issued` are numbers of the last committed and the last issued step.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.admissions = 0
        self.loads = 0
        self.evictions = 0
        self._slot: OrderedDict[int, int] = OrderedDict()  # resident and loading, least recently admitted first
        self._loading: set[int] = set()
        self._users: dict[int, int] = {}
        self._used_until: dict[int, int] = {}  # last step that may use an idle adapter
        # (slot, last step that may use it)
        self._free: list[tuple[int, int]] = [(slot, -1) for slot in range(num_slots - 1, -1, -1)]

    @property
    def resident(self) -> dict[int, int]:
        """Number -> slot of every usable adapter, least recently admitted first."""
        return {number: slot for number, slot in self._slot.items() if number not in self._loading}

    @property
    def num_loading(self) -> int:
        """Number of adapters that are loading."""
        return len(self._loading)

    def is_resident(self, number: int) -> bool:
        """Return whether `acquire` may be called."""
        return number in self._slot and number not in self._loading

    def is_loading(self, number: int) -> bool:
        """Return whether the adapter is being loaded into a slot."""
        return number in self._loading

    def users(self, number: int) -> int:
        """Return the number of running sequences with an adapter."""
        return self._users.get(number, 0)

    def start_load(self, number: int, committed: int, spared: set[int]) -> int | None:
        """Reserve a slot for an adapter, which is loading until `finish_load` or `remove`; None if none is available.

        `spared`: idle adapters that must not be evicted.
        """
        slot = next((slot for slot, until in self._free if until <= committed), None)
        if slot is not None:
            self._free = [entry for entry in self._free if entry[0] != slot]
        else:
            victim = next(
                (
                    other
                    for other in self._slot
                    if other not in spared and self._used_until.get(other, -1) <= committed and self._is_idle(other)
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

    def frees_soon(self, committed: int) -> bool:
        """Return whether a slot becomes available once the steps in flight return, without draining another."""
        idle = (other for other in self._slot if self._is_idle(other))
        return any(until > committed for _, until in self._free) or any(
            self._used_until.get(other, -1) > committed for other in idle
        )

    def finish_load(self, number: int) -> None:
        """Mark an adapter as resident."""
        self._loading.discard(number)

    def remove(self, number: int) -> None:
        """Free the slot of an adapter that failed to load or was removed.

        Raises ValueError while running sequences use it.
        """
        if self.users(number):
            raise ValueError(
                f"adapter number {number} has {self.users(number)} running sequences; wait for them or abort them"
            )
        if number in self._slot:
            until = self._used_until.get(number, -1)
            self._free.append((self._drop(number), until))

    def acquire(self, number: int) -> int:
        """Add a user of a resident adapter; return its slot."""
        self._slot.move_to_end(number)
        self._users[number] = self.users(number) + 1
        self.admissions += 1
        return self._slot[number]

    def release(self, number: int, issued: int) -> None:
        """Remove a user; the adapter stays resident until its slot is needed."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]
        self._used_until[number] = issued

    def replace(self, old: int, number: int) -> int:
        """Give the slot of a resident adapter, with its users, to another one, which the next plan loads; return it."""
        self._slot[number] = slot = self._slot.pop(old)
        self._users[number] = self._users.pop(old)
        self._used_until[number] = self._used_until.pop(old, -1)
        self.loads += 1
        return slot

    def holds(self, slot: int, number: int) -> bool:
        """Return whether an adapter is resident in a slot."""
        return self.is_resident(number) and self._slot[number] == slot

    def draining_order(self) -> list[int]:
        """Return the adapters in use, least recently admitted first: those to drain when another waits."""
        return [number for number in self._slot if self.users(number)]

    def _is_idle(self, number: int) -> bool:
        return not self.users(number) and number not in self._loading

    def _drop(self, number: int) -> int:
        self._loading.discard(number)
        self._used_until.pop(number, None)
        return self._slot.pop(number)


class AdapterResidency:
    """Decides which adapters are loaded and evicted, for waiting adapters in the order of their turns.

    Fair turns alone would let adapters without served tokens, such as replaced versions, overtake a request forever.
    So after MAX_OVERTAKING_LOADS loads for other adapters, the oldest waiting request of the highest priority without
    a slot is due: its adapter gets the next slot, no other load starts before, and it is admitted first. The loads of
    one step start together, so at most MAX_OVERTAKING_LOADS + num_slots - 1 loads start between two for the oldest.

    committed  last committed step
    patience   number of steps. While all slots are in use, the least recently admitted adapter admits no new requests,
               and after `patience` steps its running sequences are preempted. A slot is thus reassigned at most about
               once in `patience` steps
    """

    def __init__(self, num_slots: int, patience: int, asynchronous: bool, waiting: WaitingQueues) -> None:
        self.slots = AdapterSlots(num_slots)
        self.asynchronous = asynchronous
        self.failures = self.audit_failures = 0
        self.committed = -1
        self._patience = patience
        self._waiting = waiting
        self._loads: list[tuple[int, int]] = []
        self._since: dict[int, int] = {}  # waiting adapter without a slot -> first step that needed it
        self._retiring: set[int] = set()
        self._retired: list[int] = []
        # (adapter to preempt, adapter that gets its slot)
        self._vacate: tuple[int, int] | None = None
        self._leaving: tuple[int, int] | None = None
        self._vacated_at = -patience
        self._spared: set[int] = set()
        # loaded and not yet used: evicting them while requests wait could make two adapters evict each other forever
        self._unused: set[int] = set()
        self._draining: set[int] = set()
        self._step = 0
        self._full = False
        self._victims: Iterator[int] | None = None
        self._overtaking_loads = 0
        self._due: Sequence | None = None

    def prefetch(self, number: int) -> None:
        """Load an adapter at its first request: into a slot that is not needed, else into host memory only."""
        if not self.asynchronous or number < 0 or self.slots.is_resident(number) or self.slots.is_loading(number):
            return
        spared = {other for other in self.slots.resident if self._waiting.active(other)}
        # adapters that already wait for a slot have priority
        slot = self.slots.start_load(number, self.committed, spared) if not self._since else None
        self._overtaking_loads += slot is not None
        self._loads.append((-1 if slot is None else slot, number))

    def load_now(self, number: int) -> None:
        """Start to load an adapter if a slot is available."""
        slot = self.slots.start_load(number, self.committed, self._spared)
        if slot is not None:
            self._since.pop(number, None)
            self._loads.append((slot, number))

    def replace(self, old: int, number: int) -> int:
        """Give the slot of a resident adapter, with its users, to another one; return the slot."""
        self._since.pop(number, None)
        return self.slots.replace(old, number)

    def start_pass(self, step: int) -> Sequence | None:
        """Start to visit the waiting adapters in the order of their turns; `step`: the plan that is being made.

        Return the due request, to visit first, if any. It stays due until it is admitted or another one is.
        """
        self._step = step
        if self._overtaking_loads >= MAX_OVERTAKING_LOADS:
            self._due = self._waiting.oldest(self._lacks_slot)
            if self._due is None:
                self._overtaking_loads = 0
        elif self._due is not None and self._due.status is not Status.WAITING:
            self._due = None
        self._spared = {number for number in self._unused if self._waiting.active(number)}
        self._draining.clear()
        self._full = self.slots.num_slots == 0
        self._victims = None
        return self._due

    def _lacks_slot(self, number: int) -> bool:
        return number >= 0 and not self.slots.is_resident(number) and not self.slots.is_loading(number)

    @property
    def can_load(self) -> bool:
        """Whether a load can be started for further adapters of this pass."""
        return not self._full

    def ready(self, number: int) -> bool:
        """Return whether a request of this adapter may be admitted now. Start to load a missing adapter if possible."""
        if number < 0:
            return True
        if self.slots.is_resident(number):
            if self._leaving is not None and self._leaving[0] == number and self._leaving[1] in self._since:
                return False
            self._spared.add(number)
            return number not in self._draining
        if self.slots.is_loading(number):
            return False
        slot = self.slots.start_load(number, self.committed, self._spared) if self._victims is None else None
        if slot is None:
            self._wait_for_slot(number)
            return False
        is_due = self._due is not None and self._due.number == number
        self._overtaking_loads = 0 if is_due else self._overtaking_loads + 1
        self._since.pop(number, None)
        self._spared.add(number)
        if self._leaving is not None and self._leaving[1] == number:
            self._leaving = None
        self._loads.append((slot, number))
        if self.asynchronous:
            return False
        self._mark_loaded(number)
        return True

    def admit(self, number: int) -> int:
        """Add a running sequence of a `ready` adapter; return its slot, -1 for the base model."""
        self._unused.discard(number)
        return self.slots.acquire(number) if number >= 0 else -1

    def loads_of_plan(self) -> list[tuple[int, int]]:
        """Return the loads of the plan itself; none with asynchronous loads."""
        return [] if self.asynchronous else self.take_loads()

    def take_vacated(self, progressed: Callable[[int], bool]) -> int | None:
        """Return the adapter to preempt, or None. Its requests wait until the other adapter has the slot.

        `progressed(number)`: whether each running sequence of the adapter has sampled a token since its admission.
        Preempting earlier could let two adapters exchange the slot forever without computing a prompt.
        """
        vacate, self._vacate = self._vacate, None
        if vacate is None or vacate[1] not in self._since or not progressed(vacate[0]):
            return None
        self._leaving, self._vacated_at = vacate, self._step
        return vacate[0]

    def _wait_for_slot(self, number: int) -> None:
        self._full = True
        since = self._since.setdefault(number, self._step)
        if self._victims is None:  # first adapter of this pass without a slot; later ones get none either
            self._victims = iter(() if self.slots.frees_soon(self.committed) else self.slots.draining_order())
        victim = (
            next(self._victims, None) if len(self._draining) < max(1, self.slots.num_slots // DRAINING_SHARE) else None
        )
        if victim is None:
            return
        self._draining.add(victim)
        interval = max(1, self._patience // self.slots.num_slots)
        if self._step - since >= self._patience and self._step - self._vacated_at >= interval and self._vacate is None:
            self._vacate = (victim, number)

    def take_loads(self) -> list[tuple[int, int]]:
        """Return (slot, number) of the loads to start; slot -1: into host memory only."""
        loads, self._loads = self._loads, []
        return loads

    def finish_load(self, number: int) -> None:
        """Mark a loaded adapter as resident."""
        self._mark_loaded(number)
        if not self._waiting.active(number):
            self.note_unused(number)

    def _mark_loaded(self, number: int) -> None:
        self.slots.finish_load(number)
        self._unused.add(number)
        if self._leaving is not None and self._leaving[0] == number:
            self._leaving = None

    def fail_load(self, number: int) -> None:
        """Free the slot of a failed load. No sequence waits for the adapter any more."""
        self.failures += 1
        self.slots.remove(number)
        self.note_unused(number)

    def evict_damaged(self, slot: int, number: int) -> None:
        """Free a damaged slot, unless it has been given away. Call it without running sequences of the adapter."""
        self.audit_failures += 1
        if self.slots.resident.get(number) == slot:
            self.slots.remove(number)
            self._unused.discard(number)

    def forget_resident(self) -> None:
        """Free all slots. Call it only without running sequences and loads."""
        for number in self.slots.resident:
            self.slots.remove(number)

    def retire(self, number: int) -> None:
        """Free the adapter's slot, and report it by `take_retired`, after its last request. It gets no new ones."""
        self._retiring.add(number)
        if not self._waiting.active(number):
            self.note_unused(number)

    def is_retiring(self, number: int) -> bool:
        """Return whether the adapter gets no new requests, although the runner may still have it."""
        return number in self._retiring or number in self._retired

    def note_unused(self, number: int) -> None:
        """Note that the adapter's last request has ended."""
        self._since.pop(number, None)
        self._unused.discard(number)
        # a load must end before its slot is reused
        if number in self._retiring and not self.slots.is_loading(number):
            self._retiring.discard(number)
            self.slots.remove(number)
            self._retired.append(number)

    def take_retired(self) -> list[int]:
        """Return the retired adapters without requests since the last call."""
        retired, self._retired = self._retired, []
        return retired
