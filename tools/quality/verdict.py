"""When "identical to bf16" may be said: each condition of the protocol with its figure.

Everything else is a gap, and is named.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .arms import UNFUSED
from .divergence import ALL, Divergence, Share
from .exact import Accuracy, Needle
from .statistics import loss_bounds

State = Literal["met", "missed", "undecided", "not measured"]
MOST_LOSS, MOST_POOLED_LOSS = 0.01, 0.005
MOST_FLIPS = 2.0  # times those of bf16 computed in another way
ITSELF = "bf16 against itself"
MOST_MEAN_KL, LEAST_TOP_1, MOST_PERPLEXITY_RATIO = 0.005, 0.97, 1.005
MOST_NEEDLE_DIFFERENCE = 0.02
FEWEST_TOKENS, FEWEST_DOCUMENTS, FEWEST_ITEMS = 200_000, 400, 3500
FEWEST_NEEDLES = 50  # of a length and depth: one answer is then two points
SLACK = 1e-12


@dataclass(frozen=True)
class Condition:
    """One condition of the protocol: what was found, what is asked, and whether that holds.

    `telling`: a planted fault is expected to miss it.
    """

    name: str
    figure: str
    limit: str
    state: State
    telling: bool = True


@dataclass
class ArmResult:
    """All that was measured of one arm."""

    arm: str
    about: str
    control: bool = False
    divergences: list[Divergence] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)
    pooled: Accuracy | None = None
    needles: list[Needle] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def identical(self) -> bool:
        """Whether "identical to bf16" may be said."""
        return bool(self.conditions) and all(condition.state == "met" for condition in self.conditions)

    @property
    def failed(self) -> bool:
        """Whether a condition is missed that has nothing to do with how much was asked."""
        return any(condition.state == "missed" and condition.telling for condition in self.conditions)

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.identical:
            return "identical to bf16"
        return "gap" if any(condition.state == "missed" for condition in self.conditions) else "not decided"


def judge(results: Sequence[ArmResult], again: Accuracy | None) -> None:
    """Give every arm its conditions.

    Flips are judged by those of bf16 computed in another way (the arm UNFUSED), which differs in every rounding as
    another engine's bf16 does; where that arm did not run, by those of bf16 at another load.
    """
    noise, whose = noise_of(results, again)
    for result in results:
        result.conditions = conditions(result, noise, whose)


def noise_of(results: Sequence[ArmResult], again: Accuracy | None) -> tuple[Accuracy | None, str]:
    """The answers that flips are judged by, and whose they are."""
    other = next((result.pooled for result in results if result.arm == UNFUSED), None)
    return (other, UNFUSED) if other is not None else (again, ITSELF)


def conditions(result: ArmResult, noise: Accuracy | None, whose: str = ITSELF) -> list[Condition]:
    """The protocol's conditions for an arm; `noise`: the answers of `whose`, which its flips are compared with."""
    found = [_losses(result.accuracies), _pooled(result.pooled), _flips(result.pooled, noise, whose)]
    found += [
        _divergence(
            result,
            "mean KL at its upper bound",
            f"<= {MOST_MEAN_KL}",
            lambda each: each.mean_kl[2],
            MOST_MEAN_KL,
            "{:.2e}",
        ),
        _divergence(
            result, "top-1 agreement", f">= {LEAST_TOP_1:.0%}", lambda each: -each.top_1[0], -LEAST_TOP_1, "{:.2%}", -1
        ),
        _divergence(
            result,
            "perplexity ratio",
            f"<= {MOST_PERPLEXITY_RATIO}",
            lambda each: each.perplexity_ratio[0],
            MOST_PERPLEXITY_RATIO,
            "{:.4f}",
        ),
        _needles(result.needles),
        _sample(result),
    ]
    return found


def _divergence(
    result: ArmResult,
    name: str,
    limit: str,
    value: Callable[[Divergence], float],
    most: float,
    form: str,
    sign: int = 1,
) -> Condition:
    """The adapter in which a figure is worst."""
    if not result.divergences:
        return Condition(name, "", limit, "not measured")
    worst = max(result.divergences, key=value)
    state: State = "met" if value(worst) <= most + SLACK else "missed"
    return Condition(
        name, f"{form.format(sign * value(worst))} ({worst.adapter}){_over_all(result.divergences, name)}", limit, state
    )


def _over_all(each: Sequence[Divergence], name: str) -> str:
    """The same figure over all tokens that were read, where they are not the ones that count."""
    shares = [(one.shares[ALL], one) for one in each if ALL in one.shares]
    if not any(share.tokens != one.tokens for share, one in shares):
        return ""
    forms: dict[str, tuple[Callable[[Share], float], str]] = {
        "mean KL at its upper bound": (lambda share: share.mean_kl, "mean {:.2e}"),
        "top-1 agreement": (lambda share: -share.top_1, "{:.2%}"),
        "perplexity ratio": (lambda share: share.perplexity_ratio, "{:.4f}"),
    }
    value, form = forms[name]
    share, worst = max(shares, key=lambda pair: value(pair[0]))
    return f"; over all tokens read {form.format(abs(value(share)))} ({worst.adapter})"


def _losses(each: Sequence[Accuracy]) -> Condition:
    limit = f"< {MOST_LOSS * 100:g} point for each adapter"
    if not each:
        return Condition("accuracy loss at its upper bound", "", limit, "not measured")
    worst = max(each, key=lambda one: one.upper)
    missed = any(one.loss >= MOST_LOSS and one.lower > 0 for one in each)
    state: State = "met" if worst.upper < MOST_LOSS else "missed" if missed else "undecided"
    return Condition(
        "accuracy loss at its upper bound",
        f"{_points(worst.upper)} ({worst.adapter}; measured {_points(worst.loss)})",
        limit,
        state,
    )


def _pooled(pooled: Accuracy | None) -> Condition:
    limit = f"< {MOST_POOLED_LOSS * 100:g} points"
    if pooled is None:
        return Condition("pooled accuracy loss at its upper bound", "", limit, "not measured")
    missed = pooled.loss >= MOST_POOLED_LOSS and pooled.lower > 0
    state: State = "met" if pooled.upper < MOST_POOLED_LOSS else "missed" if missed else "undecided"
    return Condition(
        "pooled accuracy loss at its upper bound",
        f"{_points(pooled.upper)} (measured {_points(pooled.loss)})",
        limit,
        state,
    )


def _flips(pooled: Accuracy | None, noise: Accuracy | None, whose: str) -> Condition:
    limit = f"<= {MOST_FLIPS:g} times those of {whose}"
    if pooled is None or noise is None:
        return Condition("answer flips", "", limit, "not measured", telling=False)
    rate, own = pooled.flips / pooled.items, noise.flips / noise.items
    state: State = "met" if rate <= MOST_FLIPS * own + SLACK else "missed"
    return Condition(
        "answer flips",
        f"{pooled.flips} of {pooled.items}, {whose} {noise.flips} of {noise.items}",
        limit,
        state,
        telling=False,
    )


def _needles(each: Sequence[Needle]) -> Condition:
    limit = f"within {MOST_NEEDLE_DIFFERENCE * 100:g} points at every length and depth"
    if not each:
        return Condition("needle", "", limit, "not measured")
    worst = max(each, key=lambda one: abs(one.reference - one.arm))
    difference, few = worst.arm - worst.reference, min(one.items for one in each) < FEWEST_NEEDLES
    state: State = "met" if abs(difference) <= MOST_NEEDLE_DIFFERENCE + SLACK else "missed"
    if few and (state == "met" or abs(difference) * worst.items <= 1.5):  # one answer of few
        state = "undecided"
    items, worse, better = (sum(getattr(one, name) for one in each) for name in ("items", "worse", "better"))
    upper = loss_bounds(worse, better, items)[1]
    figure = (
        f"{_points(difference)} at {worst.length} tokens, depth {worst.depth:g} ({worst.items} items); of all "
        f"{items:,} "
        f"{worse} lost, {better} won, loss at most {_points(upper)}"
    )
    return Condition("needle", figure, limit, state)


def _sample(result: ArmResult) -> Condition:
    limit = f">= {FEWEST_TOKENS:,} tokens, {FEWEST_DOCUMENTS} documents, {FEWEST_ITEMS:,} questions for each adapter"
    adapters = {each.adapter for each in result.accuracies}
    tokens = min((each.tokens for each in result.divergences if each.adapter in adapters), default=0)
    documents = min((each.documents for each in result.divergences if each.adapter in adapters), default=0)
    items = min((each.items for each in result.accuracies), default=0)
    enough = tokens >= FEWEST_TOKENS and documents >= FEWEST_DOCUMENTS and items >= FEWEST_ITEMS
    return Condition(
        "sample",
        f"{tokens:,} tokens, {documents:,} documents, {items:,} questions",
        limit,
        "met" if enough else "undecided",
    )


def _points(share: float) -> str:
    return f"{share * 100:+.2f} points"
