"""Sampling where each rank has a part of the vocabulary.

Greedy rows, and rows that are drawn without a filter, need no rank's logits elsewhere: ranks exchange the best token of
each part, as keys of 8 bytes a row. What is drawn is relative to the largest logit of all parts, so a step with such
rows exchanges twice. Penalties, biases, masks, top-k, top-p, min-p and log-probabilities need all logits: they are
gathered then. Either way all ranks have the tokens that one process would draw from the same logits.
"""

import torch

from ...ops.collectives.all_gather import all_gather
from ...ops.collectives.group import RankGroup
from ...ops.elementwise.best_of_part import best_of_part, tokens_of, values_of
from ...ops.elementwise.sample import GREEDY_BELOW
from ..scheduler.step_plan import SamplingPlan, StepMasks, StepPlan
from .sampler import DeviceSamples, Sampler


def is_plain(sampling: SamplingPlan, masks: StepMasks | None = None) -> bool:
    """Whether a step's tokens follow from the best of each part."""
    edits = len(sampling.history_rows), len(sampling.bias_rows), len(sampling.allowed_rows)
    if any(edits) or (masks is not None and len(masks.rows)):
        return False
    if sampling.num_logprobs >= 0 or sampling.num_prompt_logprobs >= 0:
        return False
    unfiltered = (sampling.top_k == 0) & (sampling.top_p >= 1.0) & (sampling.min_p <= 0.0)
    return sampling.greedy or bool((unfiltered | (sampling.temperature < GREEDY_BELOW)).all())


class ShardedSampler:
    """A `Sampler` for parts of logits; all ranks call it with the same plans.

    sampler     for steps that need all logits
    group       whose parts these are, in rank order
    vocabulary  tokens of all parts; columns beyond it fill up the last parts
    """

    def __init__(self, sampler: Sampler, group: RankGroup, vocabulary: int) -> None:
        self._sampler, self._group, self._vocabulary = sampler, group, vocabulary

    def __call__(
        self,
        logits: torch.Tensor,
        plan: StepPlan,
        masks: StepMasks | None = None,
        positions: torch.Tensor | None = None,
    ) -> DeviceSamples:
        """See `Sampler`; logits [R, N] of this rank's part, or of the whole vocabulary where it is not split."""
        if logits.shape[1] == self._vocabulary:
            return self._sampler(logits, plan, masks, positions)
        if not is_plain(plan.sampling, masks):
            return self._sampler(all_gather(logits, self._group.name, self._vocabulary), plan, masks, positions)
        return DeviceSamples(self._best(logits[: len(plan.sampling.temperature)], plan.sampling, positions))

    def warm_up(self, part: torch.Tensor) -> None:
        """See `Sampler.warm_up`; `part` [R, N] as logits are."""
        self._sampler.warm_up(part.new_empty(1, self._vocabulary))
        if part.shape[1] != self._vocabulary:
            place, first = (0, part.shape[1]), part[:1]
            numbers = [torch.zeros(1, dtype=dtype, device=part.device) for dtype in (torch.float32, torch.int64)]
            best_of_part(first, *place)
            best_of_part(first, *place, numbers[0], numbers[0], numbers[1], numbers[1])

    def _best(self, part: torch.Tensor, sampling: SamplingPlan, positions: torch.Tensor | None) -> torch.Tensor:
        first = self._group.rank * part.shape[1]
        place = first, min(max(self._vocabulary - first, 0), part.shape[1])
        likeliest = self._largest(best_of_part(part, *place))
        largest, tokens = values_of(likeliest), tokens_of(likeliest)
        if not sampling.greedy:
            numbers = self._sampler.numbers(sampling, positions)
            temperature = numbers["temperature"]
            drawn = best_of_part(part, *place, largest, temperature, numbers["seeds"], numbers["steps"])
            tokens = tokens.where(temperature < GREEDY_BELOW, tokens_of(self._largest(drawn)))
        return tokens.where(largest.isfinite(), -1)

    def _largest(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._group.gather(keys)).amax(0)
