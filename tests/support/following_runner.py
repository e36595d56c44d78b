"""A fake runner that keeps the sequences' tokens, as the device does with speculation: it alone knows where a sequence
stands, drafts for it, and says what it has accepted.
"""

import random
from dataclasses import replace

import numpy as np
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.scheduler.step_plan import StepPlan, StepResult

from .fake_runner import EMPTY, LoadingFakeRunner, next_token


class FollowingFakeRunner(LoadingFakeRunner):
    """Its drafts are what the model says next, each with the probability `right`.

    What is kept of answers must be what the sequence's own adapter said, and what a ring is said to hold must have been
    kept in it, all by the sequence's adapter. `recalls` counts the sequences of steps that had a ring with answers.
    """

    def __init__(self, *args: int, right: float = 0.7, seed: int = 0, ring_tokens: int = 0, **options) -> None:
        super().__init__(*args, **options)
        self.histories: dict[int, list[int]] = {}
        self.right, self.ring_tokens = right, ring_tokens
        self.drafted = self.accepted = self.recalls = 0
        self._adapters: dict[int, int] = {}  # of the sequence that holds a row
        self._active_from: dict[int, int] = {}
        self.contents: dict[int, int] = {}  # adapter -> another one with the same content
        self._rings: dict[tuple[int, int], int] = {}  # (ring, place) -> the adapter whose token it is
        self._dice = random.Random(seed)

    def submit(self, plan: StepPlan) -> StepResult:
        placed = self._place(plan)
        if not plan.verifies:
            result = super().submit(placed)
            for index in plan.sample_rows.tolist():
                self.histories[int(plan.follow_rows[index])].append(max(0, int(result.tokens[index])))
            return replace(result, accepted=np.zeros(plan.num_sequences, np.int32))
        return self._verify(plan, placed)

    def fail(self, plan: StepPlan) -> None:
        super().fail(self._place(plan))
        for index in plan.sample_rows.tolist():
            self.histories[int(plan.follow_rows[index])].append(0)

    def _place(self, plan: StepPlan) -> StepPlan:
        """The plan with what only the device knows."""
        assert plan.follows and not len(plan.feed_positions)
        self._keep(plan)
        for slot, number in plan.slot_loads.tolist():
            self.slots[slot] = number
        told = iter(plan.start_tokens.tolist())
        for row, length in zip(plan.start_rows.tolist(), plan.start_lengths.tolist(), strict=True):
            self.histories[row] = [next(told) for _ in range(length)]
        arrays = {
            name: getattr(plan, name).copy() for name in ("input_ids", "positions", "slot_mapping", "context_lens")
        }
        for index, (row, drafts) in enumerate(zip(plan.follow_rows.tolist(), plan.drafts.tolist(), strict=True)):
            mine = slice(plan.query_start[index], plan.query_start[index + 1])
            if row >= 0:
                self._look_up(plan, index, row)
            if drafts < 0:
                assert row < 0 or row in plan.start_rows
                continue
            tokens, known = self.histories[row], arrays["context_lens"][index]
            adapter = int(plan.adapter_index[mine.start])
            adapter = self.slots[adapter] if adapter >= 0 else -1
            assert plan.positions[mine.start] <= len(tokens) - 1 <= len(tokens) + drafts - 1 < known
            guesses: list[int] = []
            for _ in range(drafts):
                said = next_token(tokens + guesses, adapter, self.vocabulary, self._active_from[row])
                guesses.append(said if self._dice.random() < self.right else (said + 1) % self.vocabulary)
            places = np.arange(len(tokens) - 1, len(tokens) + drafts)
            arrays["input_ids"][mine] = [tokens[-1], *guesses]
            arrays["positions"][mine] = places
            arrays["slot_mapping"][mine] = plan.block_table[index][places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
            arrays["context_lens"][index] = len(tokens) + drafts
        return replace(plan, **arrays)

    def _keep(self, plan: StepPlan) -> None:
        written: set[tuple[int, int]] = set()
        for row, first, end, ring, place in plan.kept.tolist():
            tokens, adapter = self.histories[row][:end], self._adapters[row]
            assert 0 <= first <= end == len(tokens) and 1 + end - first <= self.ring_tokens
            if end - first:
                assert tokens[-1] == next_token(tokens[:-1], adapter, self.vocabulary, self._active_from[row])
            places = {(ring, (place + step) % self.ring_tokens) for step in range(1 + end - first)}
            assert not places & written, "nothing is written twice in a step"
            written |= places
            self._rings |= dict.fromkeys(places, self.contents.get(adapter, adapter))

    def _look_up(self, plan: StepPlan, index: int, row: int) -> None:
        slots = plan.adapter_index[plan.query_start[index] : plan.query_start[index + 1]].tolist()
        adapter = self._adapters[row] = self.slots[slots[-1]] if slots[-1] >= 0 else -1
        before = self._read(plan, index)[: int(plan.positions[plan.query_start[index]])]
        of_base = [other for _, _, other in before].count(-1) + slots.count(-1)
        self._active_from[row] = of_base if adapter >= 0 else 0
        ring, end, filled = int(plan.rings[index]), int(plan.ring_ends[index]), int(plan.ring_filled[index])
        assert 0 <= filled <= self.ring_tokens and (ring >= 0 or not filled)
        places = [(ring, (end - filled + step) % self.ring_tokens) for step in range(filled)]
        owners = {self._rings[place] for place in places}
        assert owners <= {self.contents.get(adapter, adapter)}, "answers of another adapter"
        self.recalls += filled > 0

    def _verify(self, plan: StepPlan, placed: StepPlan) -> StepResult:
        """Every row samples what the model says after the tokens up to it, as the store has them."""
        assert len(plan.logits_indices) == plan.num_tokens == len(plan.sampling.temperature)
        one_token = replace(placed, sample_rows=placed.sample_rows[:0], logits_indices=placed.query_start[1:] - 1)
        super().submit(one_token)
        said = np.full(plan.num_tokens, -7, np.int32)
        accepted = np.zeros(plan.num_sequences, np.int32)
        for index, row in enumerate(plan.follow_rows.tolist()):
            first, drafts = int(plan.query_start[index]), int(plan.drafts[index])
            seen = self._read(placed, index)
            if plan.step < self._failed + 3 and any(entry == EMPTY for entry in seen):
                self.histories[row].append(0)  # void: planned before anybody knew
                continue
            assert [position for _, position, _ in seen] == list(range(len(seen)))
            tokens = [token for token, _, _ in seen]
            assert tokens[: len(tokens) - drafts] == self.histories[row], "the store has what the history says"
            for place in range(1 + drafts):
                said[first + place] = self.say(seen[: len(seen) - drafts + place], seen[-1][2])
            guesses = placed.input_ids[first + 1 : first + 1 + drafts]
            while accepted[index] < drafts and said[first + accepted[index]] == guesses[accepted[index]]:
                accepted[index] += 1
            self.histories[row] += said[first : first + 1 + accepted[index]].tolist()
            self.drafted, self.accepted = self.drafted + drafts, self.accepted + int(accepted[index])
        return StepResult(plan.step, said, accepted=accepted)
