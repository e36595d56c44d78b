"""How far ahead the batcher submits steps, and that superfluous steps change no token."""

from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.scheduler.step_plan import AHEAD, StepPlan, StepResult
from sidestream.runtime.server import stepper as module
from sidestream.runtime.server.gpu_link import Ready, Timing
from sidestream.runtime.server.stepper import Stepper
from support.fake_runner import FakeRunner, continuation


class Link:
    """A GPU process that computes each plan at once; results are taken from a queue."""

    def __init__(self) -> None:
        self.runner = FakeRunner(40, lag=AHEAD - 1)
        self.results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.results.append(self.runner.submit(plan))

    def send(self, notice: Any) -> None:
        raise AssertionError(f"no message is expected: {notice}")


def serve(prompts: list[list[int]], tokens: int, penalised: int = 0) -> tuple[list[list[int]], list[int], list[int]]:
    """Return the answers, the number of steps in flight at each result, and the number of steps until each answer.

    penalised   so many of the first requests have a penalty, and a sixth of the tokens
    """
    link = Link()
    stepper = Stepper(Ready(97, 40, PAGE_SIZE, 320, 4, 4096, 0, [], []), link, None)  # type: ignore[arg-type]
    for number, prompt in enumerate(prompts):
        params: dict[str, Any] = (
            {"max_tokens": tokens // 6, "presence_penalty": 1e-6} if number < penalised else {"max_tokens": tokens}
        )
        stepper.engine.add(
            Request(str(number), None, prompt, SamplingParams(temperature=0, ignore_eos=True, **params)), stream=False
        )
    answers: dict[str, list[int]] = {}
    depths, steps = [], {}
    stepper.submit_steps()
    while link.results:
        depths.append(stepper.in_flight)
        result = link.runner.collect(link.results.popleft())
        _, finished = stepper.receive_result(result, Timing(1, 2, 3))
        answers.update({output.request_id: output.outputs[0].token_ids for output in finished})
        steps.update({output.request_id: len(depths) for output in finished})
    assert stepper.in_flight == 0 and stepper.stats()["pages_in_use"] == 0
    names = [str(number) for number in range(len(prompts))]
    return [answers[name] for name in names], depths, [steps[name] for name in names]


def test_the_scheduler_uses_the_speculation_settings_of_the_gpu_process() -> None:
    times = [(1, 1, 0.5), (1, 2, 0.75)]
    sizes = 97, 40, PAGE_SIZE, 320, 4, 4096, 0
    sent = Ready(*sizes, [], [], speculation="auto", step_times=times, speculation_history=300)
    ready = msgspec.convert(msgspec.to_builtins(sent), Ready)
    limits = Stepper(ready, Link(), None).scheduler.limits  # type: ignore[arg-type]
    assert (limits.speculation, limits.step_times) == ("auto", ((1, 1, 0.5), (1, 2, 0.75)))
    assert limits.ring_tokens == 300 and replace(limits, speculation="off").ring_tokens == 0


def test_the_scheduler_uses_cascade_attention_as_the_gpu_process_can() -> None:
    sent = Ready(97, 40, PAGE_SIZE, 320, 4, 4096, 0, [], [], cascade_tile=32, cascade_pages=1375)
    limits = Stepper(sent, Link(), None).scheduler.limits  # type: ignore[arg-type]
    assert (limits.cascade_tile, limits.cascade_pages) == (32, 1375)


def test_the_step_limit_is_ten_times_the_longest_step_of_the_gpu_process() -> None:
    sent = Ready(97, 40, PAGE_SIZE, 320, 4, 4096, 0, [], [], "cuda:0", longest_step=60.0)
    ready = msgspec.convert(msgspec.to_builtins(sent), Ready)
    assert Stepper(ready, Link(), None).watchdog.limit == 600.0  # type: ignore[arg-type]


def test_two_steps_ahead_of_short_ones() -> None:
    prompts = [[1, 2, 3], [5], [7, 7]]
    answers, depths, _ = serve(prompts, 20)
    assert answers == [continuation(prompt, -1, 20, 97) for prompt in prompts]
    assert depths[:15] == [AHEAD] * 15, "the device never waits for the result of the step before"


def test_one_step_ahead_of_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_STEP_TOKENS", 2)
    answers, depths, _ = serve([[1, 2, 3], [5], [7, 7]], 20)
    assert answers[1] == continuation([5], -1, 20, 97) and set(depths[:15]) == {AHEAD - 1}


def test_a_sequence_that_needs_its_last_token_gets_one_in_two_steps() -> None:
    """With penalties the next step needs the last token: planning two ahead for the others must not make it every
    third.
    """
    answers, _, steps = serve([[1, 2, 3], [5]], 120, penalised=1)
    assert answers == [continuation([1, 2, 3], -1, 20, 97), continuation([5], -1, 120, 97)]
    assert 20 <= steps[0] <= 2 * 20 + 2 and 120 <= steps[1] <= 120 + AHEAD


def test_an_abort_frees_pages_within_two_steps() -> None:
    """Also while the device computes steps that hold the request; another one gets its pages, and its own tokens."""
    link = Link()
    stepper = Stepper(Ready(97, 12, PAGE_SIZE, 640, 4, 4096, 0, [], []), link, None)  # type: ignore[arg-type]

    def add(name: str, prompt: list[int], tokens: int) -> None:
        stepper.engine.add(
            Request(name, None, prompt, SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)), stream=False
        )

    def step() -> dict[str, list[int]]:
        _, finished = stepper.receive_result(link.runner.collect(link.results.popleft()), Timing(1, 2, 3))
        return {output.request_id: output.outputs[0].token_ids for output in finished}

    add("stays", [5], 40)
    add("gone", [1] * 9 * PAGE_SIZE, 50)
    stepper.submit_steps()
    for _ in range(4):
        step()
    assert stepper.in_flight == AHEAD and stepper.stats()["pages_in_use"] == 1 + 10
    stepper.engine.abort("gone")
    steps = 0
    while stepper.stats()["pages_in_use"] > 1:
        step()
        steps += 1
    assert steps <= 2
    add("next", [3] * 9 * PAGE_SIZE, 20)
    stepper.submit_steps()
    answers: dict[str, list[int]] = {}
    while link.results:
        answers |= step()
    assert answers == {"stays": continuation([5], -1, 40, 97), "next": continuation([3] * 9 * PAGE_SIZE, -1, 20, 97)}
