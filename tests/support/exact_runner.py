"""A fake model whose keys and values tell whether a prompt step or a decode step stored them, as those of an exact
engine do: a token of the wrong kind of step, or a page of the wrong kind, changes all later answers.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from sidestream.runtime.scheduler.step_plan import StepPlan, StepResult

from .fake_runner import EMPTY, FakeRunner, LoadingFakeRunner, next_token

SAMPLED = 1000
"""What a decode step adds to the tokens that it stores."""


class MarkedStore(list[tuple[int, int, int]]):
    """The store of a FakeRunner, which marks tokens of decode steps."""

    decode = False

    def __setitem__(self, index: Any, entry: Any) -> None:
        if isinstance(index, int) and entry != EMPTY and self.decode:
            entry = (entry[0] + SAMPLED, *entry[1:])
        super().__setitem__(index, entry)


class ExactFakeRunner(LoadingFakeRunner):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.store = MarkedStore(self.store)

    def submit(self, plan: StepPlan) -> StepResult:
        self.store.decode = plan.decode
        return super().submit(plan)

    @staticmethod
    def _check(plan: StepPlan) -> None:
        """A step of prompts may have one token of each."""
        FakeRunner._check(replace(plan, decode=bool((np.diff(plan.query_start) == 1).all())))


def exact_continuation(prompt: list[int], adapter: int, count: int, vocabulary: int) -> list[int]:
    """The `count` tokens that follow a prompt in an exact engine."""
    seen, answer = list(prompt), []
    for _ in range(count):
        answer.append(next_token(seen, adapter, vocabulary))
        seen.append(answer[-1] + SAMPLED)
    return answer
