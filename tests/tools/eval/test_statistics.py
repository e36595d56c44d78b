"""The statistics of the quality tables against values that can be checked by hand."""

import math
import random

import pytest
import torch
from sidestream.tools.eval.statistics import loss_bounds, mcnemar_exact, ratio_interval, resamples, tail_interval


@pytest.mark.parametrize(("worse", "better", "p"), [
    (0, 0, 1.0),
    (5, 5, 1.0),
    (0, 5, 2 / 32),  # both outer outcomes of five fair coins
    (1, 5, 2 * (1 + 6) / 64),
    (8, 2, 2 * (1 + 10 + 45) / 1024),
    (0, 2000, 2.0**-1999 if math.ldexp(1, -1999) else 0.0),
])  # fmt: skip
def test_mcnemar_is_the_binomial_test_on_the_pairs_that_differ(worse: int, better: int, p: float) -> None:
    assert mcnemar_exact(worse, better) == pytest.approx(p, rel=1e-12)


def test_equal_answers_still_leave_room_for_a_loss() -> None:
    z = 1.6448536269514722
    low, high = loss_bounds(0, 0, 3500)
    # Tango's score at zero discordant pairs, solved by hand
    assert high == pytest.approx(z * z / (3500 + z * z), rel=1e-6)
    assert low == pytest.approx(-high, rel=1e-6)


def test_bounds_of_a_loss_are_symmetric_and_close_to_the_normal_ones_for_many_pairs() -> None:
    low, high = loss_bounds(60, 40, 10_000)
    spread = 1.6448536269514722 * math.sqrt(100 - 20**2 / 10_000) / 10_000
    assert high == pytest.approx(0.002 + spread, rel=0.03) and low == pytest.approx(0.002 - spread, rel=0.2)
    assert loss_bounds(40, 60, 10_000) == pytest.approx((-high, -low), rel=1e-6)


def test_the_upper_bound_covers_the_true_loss_as_often_as_it_says() -> None:
    dice = random.Random(7)
    pairs, worse_rate, better_rate, covered, trials = 400, 0.02, 0.01, 0, 400
    for _ in range(trials):
        draws = [dice.random() for _ in range(pairs)]
        worse, better = (
            sum(draw < worse_rate for draw in draws),
            sum(worse_rate <= draw < worse_rate + better_rate for draw in draws),
        )
        covered += loss_bounds(worse, better, pairs)[1] >= worse_rate - better_rate
    assert 0.91 <= covered / trials <= 0.99


def test_resamples_draw_as_many_documents_as_there_are_and_repeat_for_a_seed() -> None:
    weights = resamples(50, 200, 3)
    assert weights.sum(1).tolist() == [50.0] * 200
    assert torch.equal(weights, resamples(50, 200, 3)) and not torch.equal(weights, resamples(50, 200, 4))


def test_documents_are_resampled_not_tokens() -> None:
    """Tokens of a document that agree with each other tell no more than one: the interval must be as wide as that of
    the documents' means.
    """
    torch.manual_seed(1)
    means = torch.rand(100, dtype=torch.float64)
    counts = torch.full((100,), 1000)
    mean, low, high = ratio_interval(means * counts, counts, resamples(100, 4000, 0))
    assert mean == pytest.approx(float(means.mean()))
    assert high - low == pytest.approx(2 * 1.96 * float(means.std(correction=0)) / 10, rel=0.1)


def test_the_tail_is_that_of_all_tokens() -> None:
    torch.manual_seed(2)
    values = torch.rand(50_000, dtype=torch.float64)
    document = torch.arange(50_000) % 250
    estimate, low, high = tail_interval(values, document, torch.full((250,), 200), resamples(250, 300, 0), 0.001)
    assert estimate == pytest.approx(float(values.sort(descending=True).values[49]), abs=1e-9)
    assert low < estimate < high and low > 0.9985 and high < 0.9996
