"""An adapter with an open request is not unloaded, wherever the request stands."""

from types import SimpleNamespace
from typing import Any

from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.protocol.messages import UnloadAdapter
from sidestream.runtime.scheduler.step_plan import StepPlan
from sidestream.runtime.server.adapter_requests import AdapterDesk
from sidestream.runtime.server.gpu_link import LoadDone, LoadedAdapter, Notice, Ready, StartLoad, Unload
from sidestream.runtime.server.open_requests import OpenRequests
from sidestream.runtime.server.state import ServerState
from sidestream.runtime.server.stepper import Stepper


class Link:
    """Keeps what the GPU process is sent."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.told: list[Notice] = []
        self.submit, self.tell = self.plans.append, self.told.append


class Desk:
    """An adapter desk with one adapter, `x`, and what it answered."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.link = Link()
        ready = Ready(97, 40, PAGE_SIZE, 320, 4, 4096, 1, [], [LoadedAdapter("x", 0, 8, "hash")])
        self.stepper = Stepper(ready, self.link, None)  # type: ignore[arg-type]
        connections: Any = SimpleNamespace(say=lambda client, message: self.said.append(message))
        self.requests = OpenRequests(connections)
        self.client: Any = SimpleNamespace(number=1, open={}, gone=False)
        self.desk = AdapterDesk(ServerState(self.stepper), connections, self.requests, True, [], lambda *_: None)

    def unload(self) -> str | None:
        """The code of the refusal; None: it was passed on."""
        self.said.clear()
        self.desk.change(self.client, UnloadAdapter(1, "x"))
        if self.said:
            return str(self.said[0].code)
        assert isinstance(self.link.told[-1], Unload)
        return None


def test_an_adapter_is_in_use_while_a_prompt_for_it_is_tokenized() -> None:
    desk = Desk()
    request = desk.requests.begin(desk.client, "r", True, "x")
    assert desk.unload() == "adapter_in_use"
    desk.requests.close(request, "aborted")
    assert desk.unload() is None


def test_an_adapter_is_in_use_while_its_request_waits_runs_or_is_suspected() -> None:
    desk = Desk()
    stepper = desk.stepper
    for name in "ab":
        stepper.add(Request(name, None, [1, 2], SamplingParams(temperature=0, max_tokens=9), "x"), stream=False)
    assert desk.unload() == "adapter_in_use", "they wait"
    stepper.pump()
    (load,) = [notice for notice in desk.link.told if isinstance(notice, StartLoad)]
    stepper.load_done(LoadDone(load.slot, load.number))
    stepper.pump()
    assert desk.unload() == "adapter_in_use", "they run"
    stepper.fail(desk.link.plans[0].step)
    assert desk.unload() == "adapter_in_use", "they are suspected"
    for name in "ab":
        stepper.engine.abort(name)
    assert desk.unload() is None
