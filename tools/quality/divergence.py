"""Teacher-forced figures of one adapter, with bootstrap intervals by document."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...runtime.worker.calibrate.reader import Document
from .statistics import interval, ratio_interval, resamples, tail_interval
from .teacher_forced import DRAWN, KINDS, Compared

RESAMPLES, TAIL_RESAMPLES = 1000, 200
TAIL = 0.001
Estimate = tuple[float, float, float]


ALL = "all"


@dataclass(frozen=True)
class Share:
    """Estimates over one kind of token, or over all that were read."""

    tokens: int
    mean_kl: float
    top_1: float
    perplexity_ratio: float


@dataclass(frozen=True)
class Divergence:
    """How far an arm's distributions are from bf16's; each figure as (estimate, lower, upper) of a 95% interval.

    tokens               the tokens that count: text and answers, not what a task has drawn at random
                         (`teacher_forced.Document`)
    mean_kl, tail_kl     mean and 99.9th percentile of KL(bf16 || arm) in nats a token
    top_1                share of tokens at which both rank the same token first
    perplexity_ratio     the arm's perplexity by bf16's
    shares               the same figures for text, answers and what was drawn, each by itself, and for all tokens that
                         were read
    """

    adapter: str
    documents: int
    tokens: int
    mean_kl: Estimate
    tail_kl: Estimate
    top_1: Estimate
    perplexity_ratio: Estimate
    shares: Mapping[str, Share] = field(default_factory=dict)


def divergences(compared: Compared, documents: Sequence[Document], seed: int = 0) -> list[Divergence]:
    """One Divergence for each adapter that reads documents, and for each group of documents."""
    found = []
    for label in dict.fromkeys(document.label for document in documents):
        mine = torch.tensor([document.label == label for document in documents])
        number = mine.cumsum(0) - 1  # a document's index among those with its label
        read = mine[compared.document]
        chosen = read & (compared.kind != DRAWN)
        if not bool(chosen.any()):
            chosen = read
        owner = number[compared.document[chosen]]
        kinds = {name: read & (compared.kind == kind) for kind, name in enumerate(KINDS)}
        shares = {name: _share(compared, part) for name, part in (*kinds.items(), (ALL, read)) if bool(part.any())}
        found.append(_divergence(label, owner, int(mine.sum()), compared, chosen, seed, shares))
    return found


def _share(compared: Compared, part: torch.Tensor) -> Share:
    more = compared.arm_nll[part].double() - compared.reference_nll[part].double()
    same, kl = compared.same_top[part].double().mean(), compared.kl[part].double().mean()
    ratio = float(more.nanmean().exp()) if bool((~more.isnan()).any()) else 1.0
    return Share(int(part.sum()), float(kl), float(same), ratio)


def _divergence(
    name: str,
    owner: torch.Tensor,
    documents: int,
    compared: Compared,
    chosen: torch.Tensor,
    seed: int,
    shares: Mapping[str, Share],
) -> Divergence:
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
        name,
        documents,
        len(kl),
        ratio_interval(summed(kl), counts, weights),
        tail_interval(kl, owner, counts, weights[:TAIL_RESAMPLES], TAIL),
        ratio_interval(summed(compared.same_top[chosen]), counts, weights),
        (math.exp(ratio), math.exp(low), math.exp(high)),
        shares,
    )
