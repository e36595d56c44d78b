"""Moves running requests of an adapter to its new version, between two steps."""

from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import Sequence, Status


class AdapterSwitches:
    """Versions of updated adapters, and the switches to them that are in progress.

    A request that named an adapter without a version goes on with the new one: its KV cache stays, and the prefix cache
    gets none of its further pages. Without an output token, its prompt is computed again. The new version takes the
    slot of an old one in the next plan. If another request pins the old version, the new one gets a slot of its own as
    soon as there is one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._versions: dict[int, int] = {}  # by adapter number
        self._targets: dict[str, int] = {}  # name -> number

    def add(self, name: str, number: int, version: int, switch: bool) -> None:
        """Record an update. `switch`: move the running requests of `name` to it, before the next plan if possible."""
        self._versions[number] = version
        if switch:
            self._targets[name] = number

    def forget(self, number: int) -> None:
        """Forget an adapter that is no longer used."""
        self._versions.pop(number, None)

    def apply(self) -> None:
        """Move requests as far as that is possible. Call it before each plan."""
        for name, number in list(self._targets.items()):
            if self._scheduler.states.residency.is_retiring(number) or self._apply(name, number):
                del self._targets[name]

    def _apply(self, name: str, number: int) -> bool:
        """Move requests of a name; return whether none is left."""
        states = self._scheduler.states
        for sequence in [each for each in states.running if each.adapter == name and _follows(each, number)]:
            if sequence.length == sequence.prompt_length:
                self._scheduler.preemption.preempt(sequence)
        for sequence in states.waiting.named(name):
            if _follows(sequence, number):
                states.waiting.take(sequence)
                self._move(sequence, number)
                states.waiting.push(sequence)
        left = [each for each in states.running if each.adapter == name and _follows(each, number)]
        if left and not self._has_slot(number, left):
            return False
        for sequence in left:
            self._move(sequence, number)
        # suspects of a failed step are moved when they run or wait again
        return not self._scheduler.batch_builder.suspects

    def _has_slot(self, number: int, left: list[Sequence]) -> bool:
        """Return whether the new version has a slot; give it one if possible."""
        residency, slots = self._scheduler.states.residency, self._scheduler.states.slots
        if not slots.is_resident(number) and not slots.is_loading(number):
            users = [each.number for each in left]
            replaced = next((old for old in users if slots.users(old) == users.count(old)), None)
            if replaced is None:
                residency.load_now(number)
            else:
                self._scheduler.load_with_plan(residency.replace(replaced, number), number)
        return slots.is_resident(number)

    def _move(self, sequence: Sequence, number: int) -> None:
        states, old = self._scheduler.states, sequence.number
        if sequence.status is Status.RUNNING:
            rows, row = states.rows, sequence.row
            if states.slots.is_resident(old):  # else the new version has its slot and users
                states.slots.release(old, states.step - 1)
                rows.adapter_slot[row] = states.slots.acquire(number)
            rows.adapter_number[row] = number
            states.answers.release(int(rows.ring[row]))
            rows.ring[row] = -1
        begin = sequence.length - sequence.prompt_length
        if begin:
            if not sequence.versions:
                sequence.versions.append((0, self._versions.get(old, 0)))
            elif sequence.versions[-1][0] == begin:
                sequence.versions.pop()
            sequence.versions.append((begin, self._versions[number]))
            sequence.switched_at = states.step
        sequence.page_keys = []
        sequence.number = number
        if states.waiting.change_adapter(old, number):
            states.residency.note_unused(old)


def _follows(sequence: Sequence, number: int) -> bool:
    """Return whether a sequence can go on with the adapter `number`, and does not yet. One of aLoRA cannot."""
    return sequence.number != number and not sequence.active_from
