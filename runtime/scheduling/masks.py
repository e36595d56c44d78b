"""The masks of an issued step: what its constrained sequences may get, and what may come after each of their drafts,
computed while the device works on the step.
"""

from collections.abc import Callable, Collection
from typing import cast

import numpy as np

from ..requests.errors import RequestError
from ..steps.plan import Int32, StepDrafts, StepMasks, StepPlan
from ..structured.drafted import fill_drafted
from ..structured.matcher import Matcher, fill_masks
from .sequence import Sequence

End = Callable[[Sequence, str, str | None], None]
NOTHING_LEFT = (
    "no token is left to sample: structured_outputs leaves only tokens that bad_words, allowed_token_ids or min_tokens "
    "forbids here; allow more tokens"
)


def masks_of(
    plan: StepPlan,
    sequences: list[Sequence],
    void: Collection[Sequence],
    end: End,
    drafted: StepDrafts | None = None,
) -> StepMasks:
    """The masks of a step whose sequences' last tokens are known, and their drafts if the plan has any. Sequences whose
    tokens will be wrong (`void`) have none, and `end` is called with (sequence, finish reason, text) for those that
    cannot or need not go on.
    """
    rows: list[int] = []
    matchers: list[Matcher] = []
    drafts: list[list[int]] = []
    tokens = [] if drafted is None else drafted.tokens.tolist()
    for place, row in enumerate(plan.masked_rows.tolist()):
        sequence = sequences[row]
        if sequence.finished or sequence in void:
            continue
        matcher = cast(Matcher, sequence.matcher)
        try:
            matcher.advance(sequence.tokens, sequence.prompt_length)
        except RequestError as error:
            end(sequence, "error", str(error))
            continue
        rows.append(row)
        matchers.append(matcher)
        drafts.append(tokens[place][: plan.drafts[row]] if tokens else [])

    def judge(index: int, place: int, words: Int32) -> bool:
        sequence, matcher = sequences[rows[index]], matchers[index]
        reason, text = _judged(words, sequence, matcher, place)
        if reason and not place:  # after a draft: only if that holds, and then the next step says so again
            end(sequence, reason, text)
        return not reason

    own = np.array(rows, np.int32)
    if any(drafts):
        of, places, words = fill_drafted(matchers, drafts, judge)
        return StepMasks(plan.step, own[of], places, words)
    words = fill_masks(matchers)
    for index in range(len(matchers)):
        judge(index, 0, words[index])
    return StepMasks(plan.step, own, np.zeros_like(own), words)


def _judged(words: Int32, sequence: Sequence, matcher: Matcher, drafts: int) -> tuple[str, str | None]:
    """("", None) where a sequence goes on with this mask, which so many drafts precede; else (finish reason, text)."""
    if matcher.failed:
        return "error", matcher.problem()
    if sequence.edits_logits or not sequence.eos_ids:
        return _narrowed(words, sequence, matcher, drafts)
    return "", None


def _narrowed(words: Int32, sequence: Sequence, matcher: Matcher, drafts: int) -> tuple[str, str | None]:
    """Take out what the request's other parameters forbid. A text that is complete, and may only end, ends."""
    step = len(sequence.tokens) - sequence.prompt_length + drafts
    banned = sequence.banned(step)
    if not sequence.eos_ids or step < sequence.params.min_tokens:
        banned |= set(matcher.grammar.eos_ids)
    bits = words.view(np.uint32)
    for token in banned:
        if token // 32 < len(bits):
            bits[token // 32] &= ~np.uint32(1 << token % 32)
    if sequence.allowed is not None:
        kept = np.zeros_like(bits)
        np.bitwise_or.at(kept, sequence.allowed // 32, np.uint32(1) << (sequence.allowed % 32).astype(np.uint32))
        bits &= kept
    if bits.any():
        return "", None
    return ("stop", None) if matcher.accepting else ("error", NOTHING_LEFT)
