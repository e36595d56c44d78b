"""Teacher-forced figures of each adapter, with 95% intervals by bootstrap over documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...runtime.worker.calibrate.scorer import Document
from .statistics import interval, ratio_interval, resamples, tail_interval
from .teacher_forced import DRAWN, Compared

RESAMPLES, TAIL_RESAMPLES = 1000, 200
TAIL = 0.001
Estimate = tuple[float, float, float]


@dataclass(frozen=True)
class Divergence:
    """Distance between an arm's distributions and the reference's; figures are (estimate, lower, upper).

    tokens               counted tokens: all but those that a task draws at random
    mean_kl, tail_kl     mean and 99.9th percentile of KL(reference || arm) in nats per token
    top_1                share of tokens at which both rank the same token first
    perplexity_ratio     the arm's perplexity divided by the reference's
    """

    adapter: str
    documents: int
    tokens: int
    mean_kl: Estimate
    tail_kl: Estimate
    top_1: Estimate
    perplexity_ratio: Estimate


def divergences(compared: Compared, documents: Sequence[Document], seed: int = 0) -> list[Divergence]:
    """Return one Divergence for each adapter or group of documents."""
    found = []
    for label in dict.fromkeys(document.label for document in documents):
        mine = torch.tensor([document.label == label for document in documents])
        number = mine.cumsum(0) - 1  # a document's index among those with its label
        read = mine[compared.document]
        chosen = read & (compared.kind != DRAWN)
        if not bool(chosen.any()):
            chosen = read
        found.append(_divergence(label, number[compared.document[chosen]], int(mine.sum()), compared, chosen, seed))
    return found


def _divergence(
    name: str, owner: torch.Tensor, documents: int, compared: Compared, chosen: torch.Tensor, seed: int
) -> Divergence:
    """Return the figures of the `chosen` tokens; `owner` is each one's document."""
    weights = resamples(documents, RESAMPLES, seed)
    kl = compared.kl[chosen].double()

    def summed(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(documents, dtype=torch.float64).scatter_add_(0, owner, values.double())

    counts = summed(torch.ones_like(kl))
    more = compared.arm_nll[chosen].double() - compared.reference_nll[chosen].double()
    sums, targets = summed(more.nan_to_num(0.0)), summed(~more.isnan())
    low, high = interval((weights @ sums) / (weights @ targets).clamp_min(1.0))
    ratio = float(sums.sum() / targets.sum().clamp_min(1.0))
    return Divergence(
        name,
        documents,
        len(kl),
        ratio_interval(summed(kl), counts, weights),
        tail_interval(kl, owner, counts, weights[:TAIL_RESAMPLES], TAIL),
        ratio_interval(summed(compared.same_top[chosen]), counts, weights),
        (math.exp(ratio), math.exp(low), math.exp(high)),
    )
