"""Conditions that an arm must meet to be called identical to bf16, each with its figure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...eval.answers import Accuracy
from ...eval.divergence import Divergence
from ...eval.evaluate import ArmResult
from ...eval.statistics import loss_bounds

State = Literal["met", "missed", "undecided", "not measured"]
MOST_LOSS, MOST_POOLED_LOSS = 0.01, 0.005
MOST_FLIPS = 2.0  # times those of bf16 without fusions
MOST_MEAN_KL, LEAST_TOP_1, MOST_PERPLEXITY_RATIO = 0.005, 0.97, 1.005
MOST_NEEDLE_DIFFERENCE = 0.02
FEWEST_TOKENS, FEWEST_DOCUMENTS, FEWEST_ITEMS = 200_000, 400, 3500
FEWEST_NEEDLES = 50  # of each length and depth: one answer is two points
NEEDLE = "needle"  # groups of needles begin with it
SLACK = 1e-12


@dataclass(frozen=True)
class Condition:
    """One condition: its figure, its limit, and whether it holds."""

    name: str
    figure: str
    limit: str
    state: State

    def __str__(self) -> str:
        figure = f", {self.figure}" if self.figure else ""
        return f"{self.name}: {self.state}{figure}; the condition is {self.limit}"


def verdict(conditions: Sequence[Condition]) -> str:
    """Return "identical to bf16", "gap" or "not decided"."""
    states = {condition.state for condition in conditions}
    return "identical to bf16" if states == {"met"} else "gap" if "missed" in states else "not decided"


def conditions(result: ArmResult, noise: Accuracy | None) -> list[Condition]:
    """Return all conditions of an arm; `noise` has the flips of bf16 computed without fusions."""
    adapters = [each for each in result.accuracies if not each.adapter.startswith(NEEDLE)]
    needles = [each for each in result.accuracies if each.adapter.startswith(NEEDLE)]
    return [
        _loss("accuracy loss at its upper bound", adapters, MOST_LOSS),
        _loss("pooled accuracy loss at its upper bound", [each for each in [result.pooled] if each], MOST_POOLED_LOSS),
        _flips(result.pooled, noise),
        _divergence(result, "mean KL at its upper bound", lambda each: each.mean_kl[2], MOST_MEAN_KL, "{:.2e}"),
        _divergence(result, "top-1 agreement", lambda each: each.top_1[0], LEAST_TOP_1, "{:.2%}", least=True),
        _divergence(result, "perplexity ratio", lambda each: each.perplexity_ratio[0], MOST_PERPLEXITY_RATIO, "{:.4f}"),
        _needles(needles),
        _sample(result, adapters),
    ]


def _divergence(
    result: ArmResult, name: str, value: Callable[[Divergence], float], bound: float, form: str, least: bool = False
) -> Condition:
    """Judge the adapter with the worst figure."""
    limit = f"{'>=' if least else '<='} {form.format(bound)}"
    if not result.divergences:
        return Condition(name, "", limit, "not measured")
    worst = (min if least else max)(result.divergences, key=value)
    met = value(worst) >= bound - SLACK if least else value(worst) <= bound + SLACK
    return Condition(name, f"{form.format(value(worst))} ({worst.adapter})", limit, "met" if met else "missed")


def _loss(name: str, each: Sequence[Accuracy], most: float) -> Condition:
    """Judge the largest upper bound; a loss is missed where it is measured and its lower bound is above zero."""
    limit = f"< {_points(most)}"
    if not each:
        return Condition(name, "", limit, "not measured")
    worst = max(each, key=lambda one: one.upper)
    missed = any(one.loss >= most and one.lower > 0 for one in each)
    state: State = "met" if worst.upper < most else "missed" if missed else "undecided"
    return Condition(name, f"{_points(worst.upper)} ({worst.adapter}; measured {_points(worst.loss)})", limit, state)


def _flips(pooled: Accuracy | None, noise: Accuracy | None) -> Condition:
    limit = f"<= {MOST_FLIPS:g} times those of bf16 without fusions"
    if pooled is None or noise is None:
        return Condition("answer flips", "", limit, "not measured")
    met = pooled.flips / pooled.items <= MOST_FLIPS * noise.flips / noise.items + SLACK
    figure = f"{pooled.flips} of {pooled.items}, bf16 {noise.flips} of {noise.items}"
    return Condition("answer flips", figure, limit, "met" if met else "missed")


def _needles(each: Sequence[Accuracy]) -> Condition:
    limit = f"within {_points(MOST_NEEDLE_DIFFERENCE)} at every length and depth"
    if not each:
        return Condition(NEEDLE, "", limit, "not measured")
    worst = max(each, key=lambda one: abs(one.loss))
    state: State = "met" if abs(worst.loss) <= MOST_NEEDLE_DIFFERENCE + SLACK else "missed"
    few = min(one.items for one in each) < FEWEST_NEEDLES
    if few and (state == "met" or abs(worst.loss) * worst.items <= 1.5):  # one answer
        state = "undecided"
    items, worse, better = (sum(getattr(one, name) for one in each) for name in ("items", "worse", "better"))
    upper = loss_bounds(worse, better, items)[1]
    figure = (
        f"{_points(-worst.loss)} ({worst.adapter}; {worst.items} items); of all {items:,} {worse} lost, {better} won, "
        f"loss at most {_points(upper)}"
    )
    return Condition(NEEDLE, figure, limit, state)


def _sample(result: ArmResult, each: Sequence[Accuracy]) -> Condition:
    limit = f">= {FEWEST_TOKENS:,} tokens, {FEWEST_DOCUMENTS} documents, {FEWEST_ITEMS:,} questions for each adapter"
    adapters = {one.adapter for one in each}
    read = [one for one in result.divergences if one.adapter in adapters]
    tokens = min((one.tokens for one in read), default=0)
    documents = min((one.documents for one in read), default=0)
    items = min((one.items for one in each), default=0)
    enough = tokens >= FEWEST_TOKENS and documents >= FEWEST_DOCUMENTS and items >= FEWEST_ITEMS
    figure = f"{tokens:,} tokens, {documents:,} documents, {items:,} questions"
    return Condition("sample", figure, limit, "met" if enough else "undecided")


def _points(share: float) -> str:
    return f"{share * 100:+.2f} points"
