"""Which adapter sits in which slot of the GPU's stacks: a pure bookkeeper, so that it can live in another process than the tensors."""
from collections import OrderedDict


class AdapterSlots:
    """At most `num_slots` adapters are resident; an idle one, the least recently admitted first, makes room for another.

    A slot whose adapter has running sequences is never taken away.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot: OrderedDict[str, int] = OrderedDict()  # least recently admitted first
        self._users: dict[str, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self.hits = 0
        self.loads = 0

    def slot_of(self, name: str) -> int | None:
        """The slot of a resident adapter, else None."""
        return self._slot.get(name)

    @property
    def resident(self) -> dict[str, int]:
        """Name -> slot of every resident adapter, least recently admitted first."""
        return dict(self._slot)

    def users(self, name: str) -> int:
        """How many running sequences use an adapter."""
        return self._users.get(name, 0)

    def available(self, name: str) -> bool:
        """Whether `acquire` would succeed."""
        return name in self._slot or bool(self._free) or any(not self.users(other) for other in self._slot)

    def acquire(self, name: str) -> tuple[int, bool] | None:
        """(slot, whether the adapter must be loaded into it first) for one more running sequence; None if every slot is in use by others."""
        slot = self._slot.get(name)
        loads = slot is None
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                victim = next((other for other in self._slot if not self.users(other)), None)
                if victim is None:
                    return None
                slot = self._slot.pop(victim)
            self._slot[name] = slot
            self.loads += 1
        else:
            self.hits += 1
        self._slot.move_to_end(name)
        self._users[name] = self.users(name) + 1
        return slot, loads

    def release(self, name: str) -> None:
        """One running sequence less; the adapter stays resident until its slot is needed."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]

    def forget(self, name: str) -> None:
        """Give up the slot of an adapter that was removed or replaced. Raises ValueError while running sequences use it."""
        if self.users(name):
            raise ValueError(f"adapter {name!r} is used by {self.users(name)} running sequences; wait for them or abort them")
        slot = self._slot.pop(name, None)
        if slot is not None:
            self._free.append(slot)

    def draining_order(self) -> list[str]:
        """Resident adapters in use, least recently admitted first: those to drain when an older request waits for a slot."""
        return [name for name in self._slot if self.users(name)]
