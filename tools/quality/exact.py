"""Questions with exact answers through `LLM.generate`, and what an arm's answers are next to bf16's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .statistics import loss_bounds, mcnemar_exact
from .suite import Question


@dataclass(frozen=True)
class Accuracy:
    """Paired answers of one adapter, or of all together.

    worse, better   right in bf16 and wrong here, and the other way round; together the flips
    changed         answers whose text differs
    loss            bf16's accuracy minus the arm's; lower, upper: its one-sided 95% bounds
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
        """Answers that became wrong or right."""
        return self.worse + self.better


@dataclass(frozen=True)
class Needle:
    """Accuracy at one prompt length and depth, in bf16 and in the arm; `worse`, `better`: found by bf16 alone, and
    by the arm alone.
    """

    length: int
    depth: float
    items: int
    reference: float
    arm: float
    worse: int = 0
    better: int = 0


def ask(llm: Any, questions: Sequence[Question], order: Sequence[int]) -> list[str]:
    """The greedy answers, in the questions' order.

    The base model's questions run in batches of their own: such decode steps have programs without LoRA.
    """
    from ...runtime.api.sampling_params import SamplingParams

    texts = [""] * len(questions)
    for part in (
        [place for place in order if questions[place].adapter is not None],
        [place for place in order if questions[place].adapter is None],
    ):
        chosen = [questions[place] for place in part]
        params = [SamplingParams(temperature=0.0, max_tokens=question.max_tokens) for question in chosen]
        prompts = [{"prompt_token_ids": list(question.tokens)} for question in chosen]
        outputs = (
            llm.generate(prompts, params, adapter=[question.adapter for question in chosen], use_tqdm=False)
            if chosen
            else []
        )
        for place, output in zip(part, outputs, strict=True):
            texts[place] = output.outputs[0].text.strip()
    return texts


def is_right(question: Question, text: str, reference: str) -> bool:
    """Exact match but for white space at the ends; where the answer is not known, bf16's is the right one."""
    return text == (reference if question.answer is None else question.answer)


def accuracies(
    questions: Sequence[Question], reference: Sequence[str], arm: Sequence[str]
) -> tuple[list[Accuracy], Accuracy | None]:
    """One Accuracy for each adapter, and the pooled one."""
    rows: dict[str, list[tuple[bool, bool, bool]]] = {}
    for question, mine, other in zip(questions, reference, arm, strict=True):
        row = is_right(question, mine, mine), is_right(question, other, mine), mine != other
        rows.setdefault(question.adapter or "base", []).append(row)
    each = [_accuracy(name, values) for name, values in rows.items()]
    return each, _accuracy("all", [row for values in rows.values() for row in values]) if rows else None


def _accuracy(name: str, rows: Sequence[tuple[bool, bool, bool]]) -> Accuracy:
    count = len(rows)
    worse, better = (
        sum(mine and not other for mine, other, _ in rows),
        sum(other and not mine for mine, other, _ in rows),
    )
    right, kept, changed = (sum(row[place] for row in rows) for place in range(3))
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


def needles(questions: Sequence[Question], reference: Sequence[str], arm: Sequence[str]) -> list[Needle]:
    """One Needle for each length and depth."""
    rows: dict[tuple[int, float], list[tuple[bool, bool]]] = {}
    for question, mine, other in zip(questions, reference, arm, strict=True):
        if question.bucket is not None:
            rows.setdefault(question.bucket, []).append(
                (is_right(question, mine, mine), is_right(question, other, mine))
            )
    return [
        Needle(
            length,
            depth,
            len(values),
            sum(mine for mine, _ in values) / len(values),
            sum(other for _, other in values) / len(values),
            sum(mine and not other for mine, other in values),
            sum(other and not mine for mine, other in values),
        )
        for (length, depth), values in sorted(rows.items())
    ]
