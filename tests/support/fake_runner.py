"""A model that is a hash of everything it should have seen: a runner for tests of scheduler and engine.

Each step checks that the plan makes sense, writes tokens into a paged store as the append would, and derives the next
token from what attention would read back through the block table (so a lost, shared or stale page changes the output).
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.scheduler.disk.disk_pages import PAGE_ABSENT
from sidestream.runtime.scheduler.step_plan import AHEAD, FileOrder, PageCopies, StepPlan, StepResult

EMPTY = (-1, -1, -2)


def next_token(tokens: list[int], adapter: int, vocabulary: int, active_from: int = 0) -> int:
    """What the fake model says after `tokens` under an adapter number (-1 = base), active from a token on (aLoRA)."""
    state = 1469598103 + adapter + 1009 * active_from
    for token in tokens:
        state = ((state ^ (token + 1)) * 16777619) & 0xFFFFFFFF
        state ^= state >> 13
    return (state >> 7) % vocabulary


def continuation(prompt: list[int], adapter: int, count: int, vocabulary: int, active_from: int = 0) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, adapter, vocabulary, active_from))
    return tokens[len(prompt) :]


class FakeRunner:
    """Executes plans at once; results may be collected later (`lag`: at most so many steps in flight)."""

    def __init__(self, num_pages: int, num_slots: int = 0, vocabulary: int = 97, lag: int = 1) -> None:
        self.store: list[tuple[int, int, int]] = [EMPTY] * (num_pages * PAGE_SIZE)  # (token, position, adapter number)
        self.slots = [-1] * num_slots
        self.vocabulary = vocabulary
        self.lag = lag
        self.plans: list[StepPlan] = []
        self._last: np.ndarray | None = None
        self._flying: deque[int] = deque()
        self.computed = 0
        self._failed = -AHEAD
        self.host: dict[int, list[tuple[int, int, int]]] = {}
        self.host_keys: dict[int, bytes] = {}  # of pages that other engines may read
        self.other: FakeRunner | None = None  # the engine whose host pages it reads
        self.copy_delay = 2
        self.failing_copies: set[int] = set()
        self._page_copies: list[list[int]] = []  # ticket, looks left
        self.files: dict[bytes, list[tuple[int, int, int]]] = {}
        self.file_delay = 3
        self._file_orders: list[list[Any]] = []  # ticket, order, looks left
        self._arriving: list[tuple[int, int, list[tuple[int, int, int]]]] = []  # ticket, page, content

    def copy_pages(self, copies: PageCopies) -> None:
        """Saves read what the steps before have written; a loaded page holds rubbish until it is reported."""
        if copies.file is not None:
            if copies.file.action == "read":
                self.host[copies.file.place] = [EMPTY] * PAGE_SIZE
            self._file_orders.append([copies.ticket, copies.file, self.file_delay])
            return
        fails = copies.ticket in self.failing_copies
        if copies.erase:
            self.host_keys.clear()
        self.host_keys |= {place: key for (_, place), key in zip(copies.saves, copies.keys, strict=False)}
        host = self.host
        if copies.source:
            assert self.other is not None
            host = self.other.host
            if any(
                self.other.host_keys.get(place) != key
                for (place, _), key in zip(copies.loads, copies.keys, strict=True)
            ):
                self.failing_copies.add(copies.ticket)
                fails = True
        for page, place in copies.saves:
            kept = self.store[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
            self.host[place] = [EMPTY] * PAGE_SIZE if fails else kept
        for place, page in copies.loads:
            self._arriving.append((copies.ticket, page, [EMPTY] * PAGE_SIZE if fails else host[place]))
            self.store[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = [EMPTY] * PAGE_SIZE
        self._page_copies.append([copies.ticket, self.copy_delay])

    def copied(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        for copy in self._page_copies:
            copy[1] -= 1
        ended = [ticket for ticket, looks in self._page_copies if looks <= 0]
        self._page_copies = [copy for copy in self._page_copies if copy[1] > 0]
        for ticket, page, content in self._arriving:
            if ticket in ended:
                self.store[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = content
        self._arriving = [each for each in self._arriving if each[0] not in ended]
        reports: list[tuple[int, str | None]] = [
            (ticket, "no memory" if ticket in self.failing_copies else None) for ticket in ended
        ]
        for each in self._file_orders:
            each[2] -= 1
        due = [(ticket, order) for ticket, order, looks in self._file_orders if looks <= 0]
        reports += [(ticket, self._end_order(ticket, order)) for ticket, order in due]
        self._file_orders = [each for each in self._file_orders if each[2] > 0]
        return reports

    def _end_order(self, ticket: int, order: FileOrder) -> str | None:
        """The page of host memory is read, or holds the file's content, only at the end: it must not change before."""
        if ticket in self.failing_copies:
            return "the disk fails"
        if order.action == "delete_all":
            self.files.clear()
        elif order.action == "write":
            self.files[order.key] = self.host[order.place]
        elif order.key not in self.files:
            return PAGE_ABSENT
        else:
            self.host[order.place] = self.files[order.key]
        return None

    def submit(self, plan: StepPlan) -> StepResult:
        assert plan.step == len(self.plans), "steps come in order"
        assert len(self._flying) <= self.lag
        self._check(plan)
        for slot, number in plan.slot_loads.tolist():
            self.slots[slot] = number
        input_ids = plan.input_ids.copy()
        if len(plan.feed_positions):
            assert self._last is not None
            input_ids[plan.feed_positions] = self._last[plan.feed_rows]
        adapters = [self.slots[slot] if slot >= 0 else -1 for slot in plan.adapter_index.tolist()]
        for token, position, slot, adapter in zip(
            input_ids.tolist(), plan.positions.tolist(), plan.slot_mapping.tolist(), adapters, strict=True
        ):
            self.store[slot] = (token, position, adapter)
        tokens = np.full(plan.num_sequences, -7, np.int32)
        for row in plan.sample_rows.tolist():
            adapter = adapters[int(plan.logits_indices[row])]
            seen = self._read(plan, row)
            # planned before anybody knew
            if self._failed < plan.step < self._failed + AHEAD and any(
                entry == EMPTY or entry[0] < 0 for entry in seen
            ):
                continue
            assert [position for _, position, _ in seen] == list(range(len(seen))), (
                "every token of the context is there, once, in order"
            )
            tokens[row] = self.say(seen, adapter)
        scores = self._score(plan)
        self._last = tokens
        self.plans.append(plan)
        self.computed += plan.num_tokens
        self._flying.append(plan.step)
        return StepResult(plan.step, tokens, **scores)

    def _score(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """A prompt's token has the log-probability -1 minus what the model says after the tokens before it."""
        count = plan.sampling.num_prompt_logprobs
        assert (count < 0) == (not len(plan.scored_rows)) and len(plan.scored_rows) == len(plan.scored_tokens)
        if count < 0:
            return {}
        said = []
        for place in plan.logits_indices[plan.scored_rows].tolist():
            row = int(np.searchsorted(plan.query_start, place, side="right")) - 1
            seen = self._read(plan, row)[: int(plan.positions[place]) + 1]
            said.append(self.say(seen, seen[-1][2], failed=plan.step < self._failed + AHEAD))
        likeliest = np.arange(count)[None] + np.array(said)[:, None]
        return {
            "prompt_tokens": np.concatenate((plan.scored_tokens[:, None], likeliest), 1).astype(np.int32),
            "prompt_logprobs": np.repeat(-1 - np.array(said, np.float32)[:, None], 1 + count, 1),
            "prompt_ranks": np.array(said, np.int32),
        }

    def say(self, seen: list[tuple[int, int, int]], adapter: int, failed: bool = False) -> int:
        """What the model says after the stored entries, of which the first may be the base's (aLoRA)."""
        others = [other for _, _, other in seen]
        active_from = others.count(-1) if adapter >= 0 else 0
        assert failed or others == [-1] * active_from + [adapter] * (len(others) - active_from), (
            "keys and values come from the sequence's own adapter, or the base before its activation"
        )
        return next_token([token for token, _, _ in seen], adapter, self.vocabulary, active_from)

    def fail(self, plan: StepPlan) -> None:
        """The step stores and samples nothing; what later plans compute from it is not checked."""
        for slot, number in plan.slot_loads.tolist():
            self.slots[slot] = number
        for slot in plan.slot_mapping.tolist():
            self.store[slot] = EMPTY
        self._last = np.full(plan.num_sequences, -7, np.int32)
        self.plans.append(plan)
        self._failed = plan.step

    def collect(self, handle: StepResult) -> StepResult:
        assert self._flying.popleft() == handle.step
        return handle

    def _read(self, plan: StepPlan, row: int) -> list[tuple[int, int, int]]:
        pages = plan.block_table[row].tolist()
        return [
            self.store[pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE]
            for position in range(int(plan.context_lens[row]))
        ]

    @staticmethod
    def _check(plan: StepPlan) -> None:
        starts, counts = plan.query_start, np.diff(plan.query_start)
        assert starts[0] == 0 and starts[-1] == plan.num_tokens and (counts >= 1).all()
        assert plan.decode == bool((counts == 1).all())
        assert len(set(plan.slot_mapping.tolist())) == plan.num_tokens, "two tokens share a slot"
        for name, value in vars(plan).items():
            if isinstance(value, np.ndarray):
                assert value.dtype == np.int32, name
        for row in range(plan.num_sequences):
            mine = slice(starts[row], starts[row + 1])
            end = plan.context_lens[row]
            assert plan.positions[mine].tolist() == list(range(end - counts[row], end)), (
                "query tokens are the last of the context"
            )
            pages = plan.block_table[row][plan.positions[mine] // PAGE_SIZE]
            assert (plan.slot_mapping[mine] == pages * PAGE_SIZE + plan.positions[mine] % PAGE_SIZE).all()


LOADING = -99


class LoadingFakeRunner(FakeRunner):
    """Copies adapters while steps run: a copy arrives after `delay(number)` looks, and the slot holds rubbish until
    then.
    """

    def __init__(
        self,
        *args: int,
        delay: Callable[[int], int] = lambda number: 2,
        failing: Mapping[int, str] | None = None,
        **options: int,
    ) -> None:
        super().__init__(*args, **options)
        self.delay = delay
        self.failing = dict(failing or {})
        self.prefetched: list[int] = []
        self.forgotten: list[int] = []
        self.started = 0
        self._copies: list[list[int]] = []  # slot, number, looks left

    def start_load(self, slot: int, number: int) -> None:
        assert number not in self.forgotten
        if slot < 0:
            self.prefetched.append(number)
        else:
            assert all(slot not in self.plans[step].adapter_index for step in self._flying), (
                "a plan at work still reads the slot"
            )
            assert all(other != slot for other, _, _ in self._copies), "two copies into one slot"
            self.slots[slot] = LOADING
            self.started += 1
        self._copies.append([slot, number, self.delay(number)])

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        reports: list[tuple[int, int, str | None]] = []
        for copy in list(self._copies):
            copy[2] -= 1
            if copy[2] <= 0:
                self._copies.remove(copy)
                slot, number, _ = copy
                if slot >= 0 and number not in self.failing:
                    self.slots[slot] = number
                reports.append((slot, number, self.failing.get(number)))
        return reports

    def forget_adapter(self, number: int) -> None:
        self.forgotten.append(number)
