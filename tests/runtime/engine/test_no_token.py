"""A request whose logits are no numbers ends with an error that says so, and no other does."""

import numpy as np
import pytest
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.scheduler.step_plan import StepPlan, StepResult
from support.engines import VOCABULARY, assert_idle, make_engine, prompt, run
from support.fake_runner import FakeRunner, continuation


class Overflowing(FakeRunner):
    """Adapter 0 overflows once the context has 12 tokens."""

    def collect(self, handle: StepResult) -> StepResult:
        return self.broken.pop(handle.step, super().collect(handle))

    def submit(self, plan: StepPlan) -> StepResult:
        result = super().submit(plan)
        adapters = plan.adapter_index[plan.query_start[1:] - 1]
        broken = (adapters >= 0) & (plan.context_lens >= 12)
        self.broken[plan.step] = StepResult(plan.step, np.where(broken, -1, result.tokens).astype(np.int32))
        return result

    broken: dict[int, StepResult]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_overflow_ends_its_request_alone(overlap: bool, stream: bool) -> None:
    engine = make_engine(slots=1, adapters=1, overlap=overlap)
    runner = engine.runner = Overflowing(40, 1, VOCABULARY)
    runner.broken = {}
    for name, adapter in (("bad", "adapter0"), ("good", None)):
        params = SamplingParams(temperature=0, max_tokens=20)
        engine.add(Request(name, None, prompt(8), params, adapter), stream=stream)
    outputs = run(engine)
    (bad,) = outputs["bad"].outputs
    assert bad.finish_reason == "error" and "not finite" in str(bad.stop_reason)
    assert bad.token_ids == continuation(prompt(8), 0, 4, VOCABULARY), "what came before it stays"
    assert outputs["good"].outputs[0].token_ids == continuation(prompt(8), -1, 20, VOCABULARY)
    assert_idle(engine)
