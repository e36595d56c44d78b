"""Teacher-forced figures of one adapter, with bootstrap intervals by document."""
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .statistics import interval, ratio_interval, resamples, tail_interval
from .teacher_forced import Compared, Document

RESAMPLES, TAIL_RESAMPLES = 1000, 200
TAIL = 0.001
Estimate = tuple[float, float, float]


@dataclass(frozen=True)
class Divergence:
    """How far an arm's distributions are from bf16's; each figure as (estimate, lower, upper) of a 95% interval.

    mean_kl, tail_kl     mean and 99.9th percentile of KL(bf16 || arm) in nats a token
    top_1                share of tokens at which both rank the same token first
    perplexity_ratio     the arm's perplexity by bf16's
    """

    adapter: str
    documents: int
    tokens: int
    mean_kl: Estimate
    tail_kl: Estimate
    top_1: Estimate
    perplexity_ratio: Estimate


def divergences(compared: Compared, documents: Sequence[Document], seed: int = 0) -> list[Divergence]:
    """One Divergence for each adapter that reads documents, and for each group of documents."""
    found = []
    for label in dict.fromkeys(document.label for document in documents):
        mine = torch.tensor([document.label == label for document in documents])
        number = mine.cumsum(0) - 1  # a document's index among those with its label
        chosen = mine[compared.document]
        owner = number[compared.document[chosen]]
        found.append(_divergence(label, owner, int(mine.sum()), compared, chosen, seed))
    return found


def _divergence(name: str, owner: torch.Tensor, documents: int, compared: Compared, chosen: torch.Tensor, seed: int) -> Divergence:
    weights = resamples(documents, RESAMPLES, seed)
    kl = compared.kl[chosen].double()

    def summed(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(documents, dtype=torch.float64).scatter_add_(0, owner, values.double())

    counts = summed(torch.ones_like(kl))
    more = compared.arm_nll[chosen].double() - compared.reference_nll[chosen].double()
    known = ~more.isnan()
    sums, targets = summed(more.nan_to_num(0.0)), summed(known)
    low, high = interval((weights @ sums) / (weights @ targets).clamp_min(1.0))
    ratio = float(sums.sum() / targets.sum().clamp_min(1.0))
    return Divergence(
        name, documents, len(kl), ratio_interval(summed(kl), counts, weights), tail_interval(kl, owner, counts, weights[:TAIL_RESAMPLES], TAIL),
        ratio_interval(summed(compared.same_top[chosen]), counts, weights), (math.exp(ratio), math.exp(low), math.exp(high)))
