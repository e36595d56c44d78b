"""Statistics of the tables: bootstrap by document, McNemar's exact test, one-sided bounds; all seeded or exact."""

import math
from collections.abc import Callable

import torch

CONFIDENCE = 0.95
Z_95 = 1.6448536269514722
"""The normal quantile of a one-sided 95% bound."""


def mcnemar_exact(worse: int, better: int) -> float:
    """Return the two-sided p of McNemar's exact test.

    `worse` pairs changed from right to wrong, `better` from wrong to right. If both directions are equally likely, the
    smaller count is binomial(worse + better, 1/2): p = 2 P(X <= min), at most 1.
    """
    trials = worse + better
    if trials == 0:
        return 1.0
    below = sum(math.comb(trials, count) for count in range(min(worse, better) + 1))
    return min(1.0, 2 * below / 2**trials)


def loss_bounds(worse: int, better: int, pairs: int, z: float = Z_95) -> tuple[float, float]:
    """Return one-sided bounds (lower, upper) of the paired difference worse / pairs - better / pairs.

    Tango's score interval (Statistics in Medicine 17, 1998); each bound has the confidence of `z` by itself. Unlike
    Wald's interval it has a width when no pair differs.
    """
    if pairs <= 0:
        return math.nan, math.nan
    estimate = (worse - better) / pairs

    def score(delta: float) -> float:
        b = -worse - better + (2 * pairs - worse + better) * delta
        c = -better * delta * (1 - delta)
        nuisance = (math.sqrt(max(b * b - 8 * pairs * c, 0.0)) - b) / (4 * pairs)
        variance = pairs * (2 * nuisance + delta * (1 - delta))
        distance = worse - better - pairs * delta
        return math.copysign(math.inf, distance) if variance <= 0 else distance / math.sqrt(variance)

    return _crossing(score, z, -1.0, estimate), _crossing(score, -z, estimate, 1.0)


def _crossing(function: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Return the point between `low` and `high` where a decreasing function crosses `level`."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > level else (low, middle)
    return (low + high) / 2


def resamples(documents: int, count: int, seed: int) -> torch.Tensor:
    """Return [count, documents] float64: how often each bootstrap sample draws each document, with replacement."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(documents, (count, documents), generator=generator)
    return torch.zeros(count, documents, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(count, documents, dtype=torch.float64)
    )


def interval(values: torch.Tensor, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the central interval of a bootstrap distribution."""
    rest = (1 - confidence) / 2
    low, high = torch.quantile(values.double(), torch.tensor([rest, 1 - rest], dtype=torch.float64)).tolist()
    return low, high


def ratio_interval(sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> tuple[float, float, float]:
    """Return (mean, low, high) of a mean over tokens, resampled by document.

    sums, counts  [documents], sum over each document's tokens, and their number
    weights       of `resamples`
    """
    sums, counts = sums.double(), counts.double()
    low, high = interval((weights @ sums) / (weights @ counts))
    return float(sums.sum() / counts.sum()), low, high


def tail_interval(
    values: torch.Tensor, document: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, share: float
) -> tuple[float, float, float]:
    """Return (estimate, low, high) of the value that a `share` of all tokens exceeds, resampled by document.

    values, document  [tokens], each token's value and the index of its document
    counts            [documents], tokens of each
    """
    keep = min(len(values), max(int(len(values) * share * 20), 1000))  # no resample reaches far beyond the tail
    top, place = torch.topk(values, keep)
    owner, counts = document[place], counts.double()

    def exceeded(weight: torch.Tensor) -> float:
        above = torch.cumsum(weight[owner], 0)
        index = int(torch.searchsorted(above, share * float(weight @ counts)))
        return float(top[min(index, keep - 1)])

    low, high = interval(torch.tensor([exceeded(weight) for weight in weights], dtype=torch.float64))
    return exceeded(torch.ones(len(counts), dtype=torch.float64)), low, high
