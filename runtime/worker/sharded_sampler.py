"""Sampling where each tensor-parallel rank has a part of the vocabulary.

Greedy rows, and rows sampled without a filter, exchange only the best token of each part, as keys of 8 bytes per row.
Sampled rows need the largest logit of all parts first, so they exchange twice. Penalties, biases, masks, top-k, top-p,
min-p and log-probabilities gather all logits. Each rank gets the tokens that one process would sample from the same
logits.
"""

import torch

from ...ops.collectives.all_gather import all_gather, gather_parts
from ...ops.collectives.tensor_parallel_group import RankGroup
from ...ops.elementwise.sample import GREEDY_BELOW
from ...ops.elementwise.vocab_parallel_argmax import best_of_part, tokens_of, values_of
from ..scheduler.step_plan import SamplingPlan, StepMasks, StepPlan
from .sampler import DeviceSamples, Sampler, edits_logits, needs_logprobs


def needs_all_logits(sampling: SamplingPlan, masks: StepMasks | None = None) -> bool:
    """Return whether a step's tokens need more than the best token of each part."""
    if edits_logits(sampling) or needs_logprobs(sampling) or (masks is not None and len(masks.rows)):
        return True
    unfiltered = (sampling.top_k == 0) & (sampling.top_p >= 1.0) & (sampling.min_p <= 0.0)
    return not (sampling.greedy or bool((unfiltered | (sampling.temperature < GREEDY_BELOW)).all()))


class ShardedSampler:
    """A `Sampler` for parts of logits; all ranks call it with the same plans.

    sampler     for steps that need all logits
    group       the ranks, in the order of their parts
    vocabulary  size of the vocabulary; the last parts may have padding columns
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
        """See `Sampler`; logits [R, N] of this rank's part, or of the whole vocabulary if it is not split."""
        if logits.shape[1] == self._vocabulary:
            return self._sampler(logits, plan, masks, positions)
        if needs_all_logits(plan.sampling, masks):
            return self._sampler(all_gather(logits, self._group.name, self._vocabulary), plan, masks, positions)
        return DeviceSamples(self._best(logits[: len(plan.sampling.temperature)], plan.sampling, positions))

    def warm_up(self, part: torch.Tensor) -> None:
        """See `Sampler.warm_up`; `part`: logits [R, N]."""
        self._sampler.warm_up(part.new_empty(1, self._vocabulary))
        if part.shape[1] != self._vocabulary:
            columns, first = (0, part.shape[1]), part[:1]
            zeros = [torch.zeros(1, dtype=dtype, device=part.device) for dtype in (torch.float32, torch.int64)]
            gather_parts(best_of_part(first, *columns), self._group.name)
            best_of_part(first, *columns, zeros[0], zeros[0], zeros[1], zeros[1])

    def _best(self, part: torch.Tensor, sampling: SamplingPlan, positions: torch.Tensor | None) -> torch.Tensor:
        first = self._group.rank * part.shape[1]
        columns = first, min(max(self._vocabulary - first, 0), part.shape[1])
        likeliest = self._largest(best_of_part(part, *columns))
        largest, tokens = values_of(likeliest), tokens_of(likeliest)
        if not sampling.greedy:
            parameters = self._sampler.parameters(sampling, positions)
            temperature = parameters["temperature"]
            drawn = best_of_part(part, *columns, largest, temperature, parameters["seeds"], parameters["steps"])
            tokens = tokens.where(temperature < GREEDY_BELOW, tokens_of(self._largest(drawn)))
        return tokens.where(largest.isfinite(), -1)

    def _largest(self, keys: torch.Tensor) -> torch.Tensor:
        return gather_parts(keys, self._group.name).amax(0)
