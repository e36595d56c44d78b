"""Token masks of a step's constrained sequences and of their drafts, filled by threads while the device computes."""

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
    "no token is left to sample: bad_words, allowed_token_ids or min_tokens forbids all that structured_outputs allows "
    "here; allow more tokens"
)
Verdict = tuple[str, str | None]
"""(finish reason, text) of a sequence that ends, or CONTINUES."""
CONTINUES: Verdict = ("", None)


class StepMaskBuilder:
    """Fills the masks of an issued step after the step before it was committed; `finish` waits for them.

    Until then no other code may use the matchers. Sequences in `void`, with invalid tokens, get no mask. A sequence
    that cannot or need not continue is ended by `end(sequence, finish reason, text)`.
    """

    def __init__(
        self, plan: StepPlan, sequences: list[Sequence], void: Collection[Sequence], end: End, filler: MaskFiller
    ) -> None:
        self._plan, self._end = plan, end
        self._rows: list[int] = []
        self._places: list[int] = []  # places of `_rows` in the plan's `masked_rows`
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
        """Number of the step."""
        return self._plan.step

    def finish(self, drafts: StepDrafts | None = None) -> StepMasks:
        """Wait for the masks and return them. `drafts`: needed if the plan has `masks_drafts`."""
        plan, filling, matchers = self._plan, self._filling, self._matchers
        rows = np.array(self._rows, np.int32)
        if filling is None:
            return StepMasks(plan.step, rows, np.zeros_like(rows), np.zeros((0, 0), np.int32))
        tokens = [] if drafts is None else drafts.tokens.tolist()
        drafted = [
            tokens[place][: max(0, plan.drafts[row])] if tokens else []
            for place, row in zip(self._places, self._rows, strict=True)
        ]
        if any(drafted):
            of, places, words = fill_drafted(matchers, drafted, self._check, filling)
            return StepMasks(plan.step, rows[of], places, words)
        words = filling.wait()[: len(rows), : matchers[0].grammar.words]
        self._check(list(range(len(rows))), 0, words)
        return StepMasks(plan.step, rows, np.zeros_like(rows), words)

    def cancel(self) -> None:
        """Discard the masks. The matchers may be used after this returns."""
        if self._filling is not None:
            self._filling.wait()

    def _check(self, indices: list[int], place: int, words: Int32) -> list[bool]:
        sequences, matchers = [self._sequences[each] for each in indices], [self._matchers[each] for each in indices]
        verdicts = _edit_masks(words, sequences, matchers, place)
        if not place:  # the draft before a later place may be rejected; if not, the next step ends the sequence
            for sequence, (reason, text) in zip(sequences, verdicts, strict=True):
                if reason and not sequence.finished:
                    self._end(sequence, reason, text)
        return [not reason for reason, _ in verdicts]


def _edit_masks(words: Int32, sequences: list[Sequence], matchers: list[Matcher], drafts: int) -> list[Verdict]:
    """Clear the bits of tokens that the requests' other parameters forbid after `drafts` drafts; return a verdict for
    each sequence.
    """
    verdicts = [CONTINUES] * len(sequences)
    edited: list[int] = []
    rows_by_banned: dict[tuple[int, ...], list[int]] = {}  # mostly one entry
    for row, (sequence, matcher) in enumerate(zip(sequences, matchers, strict=True)):
        if matcher.failed:
            verdicts[row] = "error", matcher.problem()
        elif sequence.edits_logits or not sequence.eos_ids:
            edited.append(row)
            rows_by_banned.setdefault(_banned(sequence, matcher, drafts), []).append(row)
    if not edited:
        return verdicts
    bits = words.view(np.uint32)
    reduced = set[int]()  # rows that lost a token: only these may be empty
    for tokens, rows in rows_by_banned.items():
        for token in tokens:
            if token // 32 < bits.shape[1]:
                column, bit = bits[rows, token // 32], np.uint32(1 << token % 32)
                reduced.update(row for row, had in zip(rows, (column & bit).tolist(), strict=True) if had)
                bits[rows, token // 32] = column & ~bit
            else:  # a token without a logit, so the mask cannot hold it
                reduced.update(rows)
    for row in edited:
        allowed = sequences[row].allowed
        if allowed is not None:
            kept = np.zeros_like(bits[row])
            np.bitwise_or.at(kept, allowed // 32, np.uint32(1) << (allowed % 32).astype(np.uint32))
            bits[row] &= kept
            reduced.add(row)
    for row in reduced:
        if not bits[row].any():  # a complete text that cannot continue ends
            verdicts[row] = ("stop", None) if matchers[row].accepting else ("error", NOTHING_LEFT)
    return verdicts


def _banned(sequence: Sequence, matcher: Matcher, drafts: int) -> tuple[int, ...]:
    """Return the tokens that other parameters of the request forbid after `drafts` drafts."""
    step = len(sequence.tokens) - sequence.prompt_length + drafts
    early = step < sequence.params.min_tokens
    ends = matcher.grammar.eos_ids if early or not sequence.eos_ids else ()
    if not early and sequence.bad_words is None:
        return ends
    return tuple(sorted(sequence.banned(step).union(ends)))
