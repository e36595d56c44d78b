"""The verdict of an evaluation: conditions at their limits; and documents made of questions."""

from dataclasses import replace

import pytest
from sidestream.tools.dev.eval30m.suite import needle_group, read_document
from sidestream.tools.dev.eval30m.verdict import Condition, conditions, verdict
from sidestream.tools.eval.answers import Accuracy, accuracies
from sidestream.tools.eval.divergence import Divergence
from sidestream.tools.eval.evaluate import ArmResult
from sidestream.tools.eval.suite import Question
from sidestream.tools.eval.teacher_forced import ANSWER, DRAWN, TEXT

QUESTIONS = [Question((), "x", 1, "sums") for _ in range(4000)]
NEEDLES = [Question((), "x", 1, "sums", needle_group(1024, 0.5)) for _ in range(50)]


def arm(wrong: int = 2, wrong_needles: int = 1, needles: int = 50, **changes: object) -> ArmResult:
    """An arm at the limit of every condition."""
    result = ArmResult("fp8", "")
    figures = (0.004, 0.003, 0.005), (0.1, 0.1, 0.1), (0.97, 0.96, 0.98), (1.005, 1.0, 1.01)
    result.divergences = [Divergence("sums", 400, 200_000, *figures)]
    asked = [*QUESTIONS, *NEEDLES[:needles]]
    answers = [*["y"] * wrong, *["x"] * (4000 - wrong), *["y"] * wrong_needles, *["x"] * (needles - wrong_needles)]
    result.accuracies, result.pooled = accuracies(asked, ["x"] * len(asked), answers)
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def noise(flips: int) -> Accuracy | None:
    """Answers of bf16 without fusions."""
    return accuracies(QUESTIONS, ["x"] * 4000, [*["y"] * flips, *["x"] * (4000 - flips)])[1]


def judged(result: ArmResult, flips: int = 1) -> list[Condition]:
    return conditions(result, noise(flips))


def missed(result: ArmResult) -> list[str]:
    return [str(condition) for condition in judged(result) if condition.state == "missed"]


def test_the_claim_is_made_at_the_limit_of_every_condition_and_never_beyond() -> None:
    assert verdict(judged(arm())) == "identical to bf16"
    assert verdict(judged(arm(), flips=0)) == "gap"
    good = arm().divergences[0]
    other = replace(good, adapter="other")
    top_1, ratio = replace(other, top_1=(0.9699, 0.9, 0.99)), replace(other, perplexity_ratio=(1.0051, 1.0, 1.01))
    for worse in (replace(other, mean_kl=(0.004, 0.003, 0.0051)), top_1, ratio):
        (condition,) = missed(arm(divergences=[good, worse]))
        assert "(other)" in condition
    assert missed(arm(wrong_needles=2)) and verdict(judged(arm(wrong_needles=2))) == "gap"


@pytest.mark.parametrize(
    "changes", [{"divergences": []}, {"accuracies": [], "pooled": None}, {"needles": 0, "wrong_needles": 0}]
)
def test_what_was_not_measured_is_no_claim(changes: dict[str, object]) -> None:
    assert verdict(judged(arm(**changes))) == "not decided"  # type: ignore[arg-type]


def test_too_few_tokens_are_no_claim() -> None:
    few = replace(arm().divergences[0], tokens=199_999)
    assert verdict(judged(arm(divergences=[few]))) == "not decided"


@pytest.mark.parametrize(("wrong", "state"), [(0, "undecided"), (1, "undecided"), (5, "missed")])
def test_few_needles_decide_nothing(wrong: int, state: str) -> None:
    found = next(each for each in judged(arm(needles=20, wrong_needles=wrong)) if each.name == "needle")
    assert found.state == state and f"of all 20 {wrong} lost, 0 won" in found.figure


def test_a_questions_drawn_tokens_are_marked_where_they_are_predicted() -> None:
    question = Question([0, 5, 6, 7], "x", 4, "sums")
    read = read_document(question, [8, 9])
    assert (list(read.tokens), list(read.kinds)) == ([0, 5, 6, 7, 8, 9], [DRAWN] * 3 + [ANSWER] * 3)
    read = read_document(question, [8], plain=bytes([1, 1, 0, 0]))
    assert list(read.kinds) == [TEXT, DRAWN, DRAWN, ANSWER, ANSWER]
