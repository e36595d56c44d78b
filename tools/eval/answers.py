"""Greedy answers of an arm, compared with the expected answers and with bf16's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .statistics import loss_bounds, mcnemar_exact
from .suite import Question


@dataclass(frozen=True)
class Accuracy:
    """Paired answers of one adapter or group, or of all adapters.

    worse, better   right in bf16 and wrong here, and vice versa; together the flips
    changed         answers with another text
    loss            bf16's accuracy minus the arm's, with one-sided 95% bounds `lower` and `upper`
    p               McNemar's exact test
    """

    adapter: str
    items: int
    reference: float
    arm: float
    worse: int
    better: int
    changed: int
    p: float
    loss: float
    lower: float
    upper: float

    @property
    def flips(self) -> int:
        """Return the number of answers that became wrong or right."""
        return self.worse + self.better


def ask(llm: Any, questions: Sequence[Question], order: Sequence[int]) -> list[str]:
    """Return the greedy answers in the order of the questions.

    Questions to the base model run in batches of their own, since decode steps without LoRA have other programs.
    """
    from ...runtime.api.sampling_params import SamplingParams

    texts = [""] * len(questions)
    for with_adapter in (True, False):
        part = [index for index in order if (questions[index].adapter is not None) == with_adapter]
        if not part:
            continue
        chosen = [questions[index] for index in part]
        params = [SamplingParams(temperature=0.0, max_tokens=question.max_tokens) for question in chosen]
        prompts = [{"prompt_token_ids": list(question.tokens)} for question in chosen]
        outputs = llm.generate(prompts, params, adapter=[question.adapter for question in chosen], use_tqdm=False)
        for index, output in zip(part, outputs, strict=True):
            texts[index] = output.outputs[0].text.strip()
    return texts


def accuracies(
    questions: Sequence[Question], reference: Sequence[str], arm: Sequence[str]
) -> tuple[list[Accuracy], Accuracy | None]:
    """Return one Accuracy for each label, and that of all questions without a group (None without such questions).

    An answer is right if it is the expected text but for white space at its ends; without one, if it is bf16's.
    """
    rows: dict[str, list[tuple[bool, bool, bool]]] = {}
    pooled: list[tuple[bool, bool, bool]] = []
    for question, theirs, ours in zip(questions, reference, arm, strict=True):
        expected = theirs if question.answer is None else question.answer
        row = theirs == expected, ours == expected, theirs != ours
        rows.setdefault(question.label, []).append(row)
        if not question.group:
            pooled.append(row)
    return [_accuracy(name, values) for name, values in rows.items()], _accuracy("all", pooled) if pooled else None


def _accuracy(name: str, rows: Sequence[tuple[bool, bool, bool]]) -> Accuracy:
    count = len(rows)
    worse = sum(theirs and not ours for theirs, ours, _ in rows)
    better = sum(ours and not theirs for theirs, ours, _ in rows)
    right, kept, changed = (sum(row[column] for row in rows) for column in range(3))
    lower, upper = loss_bounds(worse, better, count)
    return Accuracy(
        name,
        count,
        right / count,
        kept / count,
        worse,
        better,
        changed,
        mcnemar_exact(worse, better),
        (worse - better) / count,
        lower,
        upper,
    )
