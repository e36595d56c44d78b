"""The masks of an issued step: what its constrained sequences may get, and what may come after each of their drafts,
computed while the device works on the step and the caller on other things.
"""

from collections.abc import Callable, Collection
from typing import cast

import numpy as np

from ..text.structured.draft_masks import fill_drafted
from ..text.structured.mask_filling import MaskFiller, PendingMasks
from ..text.structured.matcher import Matcher
from .sequence import Sequence
from .step_plan import Int32, StepDrafts, StepMasks, StepPlan

End = Callable[[Sequence, str, str | None], None]
NOTHING_LEFT = (
    "no token is left to sample: structured_outputs leaves only tokens that bad_words, allowed_token_ids or min_tokens "
    "forbids here; allow more tokens"
)

Verdict = tuple[str, str | None]
GOES_ON: Verdict = ("", None)


class MasksOfStep:
    """The masks of a step whose sequences' last tokens are known. They are being filled from the beginning on; `finish`
    waits for them. Until then nobody else may touch the matchers.

    Sequences whose tokens will be wrong (`void`) have none, and `end` is called with (sequence, finish reason, text)
    for those that cannot or need not go on.
    """

    def __init__(
        self, plan: StepPlan, sequences: list[Sequence], void: Collection[Sequence], end: End, filler: MaskFiller
    ) -> None:
        self._plan, self._end = plan, end
        self._rows: list[int] = []
        self._places: list[int] = []  # of `_rows`, in the plan's `masked_rows`
        self._sequences: list[Sequence] = []
        self._matchers: list[Matcher] = []
        self._filling: PendingMasks | None = None
        for place, row in enumerate(plan.masked_rows.tolist()):
            sequence = sequences[row]
            if sequence.finished or sequence in void:
                continue
            self._rows.append(row)
            self._places.append(place)
            self._sequences.append(sequence)
            self._matchers.append(cast(Matcher, sequence.matcher))
        if self._matchers:
            drafts = int(np.maximum(plan.drafts[self._rows], 0).sum()) if len(plan.drafts) else 0
            masks = filler.room(self._matchers, len(self._matchers) + drafts)
            outputs = [(sequence.tokens, sequence.prompt_length) for sequence in self._sequences]
            self._filling = filler.begin(masks, self._matchers, outputs)

    @property
    def step(self) -> int:
        """Of which step."""
        return self._plan.step

    def finish(self, drafted: StepDrafts | None = None) -> StepMasks:
        """The masks, once they are there. `drafted`: the step's drafts if the plan's constrained sequences have any."""
        plan, filling, matchers = self._plan, self._filling, self._matchers
        rows = np.array(self._rows, np.int32)
        if filling is None:
            return StepMasks(plan.step, rows, np.zeros_like(rows), np.zeros((0, 0), np.int32))
        tokens = [] if drafted is None else drafted.tokens.tolist()
        drafts = [
            tokens[place][: max(0, plan.drafts[row])] if tokens else []
            for place, row in zip(self._places, self._rows, strict=True)
        ]
        if any(drafts):
            of, places, words = fill_drafted(matchers, drafts, self._judge, filling)
            return StepMasks(plan.step, rows[of], places, words)
        words = filling.wait()[: len(rows), : matchers[0].grammar.words]
        self._judge(list(range(len(rows))), 0, words)
        return StepMasks(plan.step, rows, np.zeros_like(rows), words)

    def drop(self) -> None:
        """Nobody wants them any more: the matchers may be used when this returns."""
        if self._filling is not None:
            self._filling.wait()

    def _judge(self, indices: list[int], place: int, words: Int32) -> list[bool]:
        sequences, matchers = [self._sequences[each] for each in indices], [self._matchers[each] for each in indices]
        verdicts = _judged(words, sequences, matchers, place)
        if not place:  # after a draft: only if that holds, and then the next step says so again
            for sequence, (reason, text) in zip(sequences, verdicts, strict=True):
                if reason and not sequence.finished:
                    self._end(sequence, reason, text)
        return [not reason for reason, _ in verdicts]


def _judged(words: Int32, sequences: list[Sequence], matchers: list[Matcher], drafts: int) -> list[Verdict]:
    """Of each sequence GOES_ON where it goes on with its mask, which so many drafts precede; else (finish reason,
    text). Takes out of the masks what the requests' other parameters forbid.
    """
    verdicts = [GOES_ON] * len(sequences)
    edited: list[int] = []
    without: dict[tuple[int, ...], list[int]] = {}  # tokens, and the rows that may not get them: mostly all the same
    for row, (sequence, matcher) in enumerate(zip(sequences, matchers, strict=True)):
        if matcher.failed:
            verdicts[row] = "error", matcher.problem()
        elif sequence.edits_logits or not sequence.eos_ids:
            edited.append(row)
            without.setdefault(_banned(sequence, matcher, drafts), []).append(row)
    if not edited:
        return verdicts
    bits = words.view(np.uint32)
    fewer = set[int]()  # rows that have lost a token: only these may have none left
    for tokens, rows in without.items():
        for token in tokens:
            if token // 32 < bits.shape[1]:
                column, bit = bits[rows, token // 32], np.uint32(1 << token % 32)
                fewer.update(row for row, had in zip(rows, (column & bit).tolist(), strict=True) if had)
                bits[rows, token // 32] = column & ~bit
            else:  # it has no logit, so the mask does not have it any more
                fewer.update(rows)
    for row in edited:
        allowed = sequences[row].allowed
        if allowed is not None:
            kept = np.zeros_like(bits[row])
            np.bitwise_or.at(kept, allowed // 32, np.uint32(1) << (allowed % 32).astype(np.uint32))
            bits[row] &= kept
            fewer.add(row)
    for row in fewer:
        if not bits[row].any():  # a text that is complete, and may only end, ends
            verdicts[row] = ("stop", None) if matchers[row].accepting else ("error", NOTHING_LEFT)
    return verdicts


def _banned(sequence: Sequence, matcher: Matcher, drafts: int) -> tuple[int, ...]:
    """The tokens that the request's other parameters forbid after so many drafts."""
    step = len(sequence.tokens) - sequence.prompt_length + drafts
    early = step < sequence.params.min_tokens
    ends = matcher.grammar.eos_ids if early or not sequence.eos_ids else ()
    if not early and sequence.forbidden is None:
        return ends
    return tuple(sorted(sequence.banned(step).union(ends)))
