"""The batcher keeps nothing of removed adapters."""

import gc
import types
from collections import deque
from typing import Any

from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.scheduler.step_plan import AHEAD, StepPlan, StepResult
from sidestream.runtime.server.gpu_link import LoadDone, LoadedAdapter, Ready, Retire, StartLoad, Timing
from sidestream.runtime.server.stepper import Stepper
from support.fake_runner import FakeRunner, continuation


class Link:
    """A GPU process that computes each plan at once and records loads and retired adapters."""

    def __init__(self) -> None:
        self.runner = FakeRunner(40, num_slots=2, lag=AHEAD - 1)
        self.results: deque[StepResult] = deque()
        self.loads: list[StartLoad] = []
        self.dropped: list[int] = []

    def submit(self, plan: StepPlan) -> None:
        self.results.append(self.runner.submit(plan))

    def send(self, notice: Any) -> None:
        if isinstance(notice, StartLoad):
            self.runner.slots[notice.slot] = notice.number
            self.loads.append(notice)
        elif isinstance(notice, Retire):
            self.dropped.append(notice.number)


class Served:
    """A stepper with two slots, and an adapter `x` that gets a new number with each content."""

    def __init__(self) -> None:
        self.link = Link()
        self.stepper = Stepper(Ready(97, 40, PAGE_SIZE, 320, 4, 4096, 2, [], []), self.link, None)  # type: ignore[arg-type]

    def replace(self, number: int) -> None:
        """`x` has another content from now on."""
        self.stepper.add_adapter(LoadedAdapter("x", number, 8, f"content {number}"))

    def ask(self, name: str, prompt: list[int]) -> None:
        """A request for `x`."""
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3)
        self.stepper.engine.add(Request(name, None, prompt, params, "x"), stream=False)

    def answers(self) -> dict[str, list[int]]:
        """Serve until nothing is left to compute."""
        answers = {}
        self.stepper.submit_steps()
        while self.link.loads or self.link.results:
            while self.link.loads:
                load = self.link.loads.pop()
                self.stepper.finish_load(LoadDone(load.slot, load.number))
            if self.link.results:
                result = self.link.runner.collect(self.link.results.popleft())
                _, finished = self.stepper.receive_result(result, Timing(1, 2, 3))
                answers.update({output.request_id: output.outputs[0].token_ids for output in finished})
            self.stepper.submit_steps()
        return answers


def kept(root: object) -> int:
    """How many objects are reached from here; neither code, the test's GPU process nor times of steps."""
    left_out = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, Link, float)
    seen, pending = {id(root): root}, [root]
    while pending:
        for found in gc.get_referents(pending.pop()):
            if id(found) not in seen and not isinstance(found, left_out):
                seen[id(found)] = found
                pending.append(found)
    return len(seen)


def test_nothing_is_kept_of_contents_that_were_replaced() -> None:
    """As many objects after a hundred more of them, some of which served a request."""
    served, counts = Served(), []
    for number in range(300):
        served.replace(number)
        if number % 3 == 0:
            served.ask("r", [5, 7])
            assert served.answers() == {"r": continuation([5, 7], number, 3, 97)}
        served.answers()
        if number in (199, 299):
            counts.append(kept(served.stepper))
    assert served.link.dropped == list(range(299))
    assert counts[1] <= counts[0] + 20, "numbers beyond 256 are objects of their own: a few, not one a content"


def test_a_replaced_content_shares_pages_until_its_last_request_is_done() -> None:
    served = Served()
    served.replace(0)
    prompt = [3] * (2 * PAGE_SIZE + 1)
    served.ask("first", prompt)
    served.answers()
    served.ask("second", prompt)
    served.replace(1)
    assert served.answers() == {"second": continuation(prompt, 0, 3, 97)}
    assert served.stepper.stats()["prefix_hits_total"] == 2 * PAGE_SIZE
    assert served.link.dropped == [0]
