"""Changes of adapters: an adapter in use is not unloaded, and an acknowledged change is the last one of its name."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.protocol.adapter_map import MAX_TOMBSTONES, AdapterEntry, Stamp
from sidestream.runtime.protocol.messages import Done, LoadAdapter, UnloadAdapter
from sidestream.runtime.scheduler.step_plan import StepPlan
from sidestream.runtime.server.adapter_requests import AdapterRequests
from sidestream.runtime.server.connections import Connections
from sidestream.runtime.server.gpu_link import (
    Load,
    LoadDone,
    LoadedAdapter,
    LoadReply,
    Notice,
    Ready,
    StartLoad,
    Unload,
)
from sidestream.runtime.server.open_requests import OpenRequests
from sidestream.runtime.server.server_state import ServerState
from sidestream.runtime.server.stepper import Stepper


class Link:
    """Records messages to the GPU process."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.sent: list[Notice] = []
        self.submit, self.send = self.plans.append, self.sent.append


class Server:
    """AdapterRequests with one adapter, `x`, and its answers."""

    def __init__(self, entries: Sequence[AdapterEntry] = ()) -> None:
        self.answers: list[Any] = []
        self.saved: list[AdapterEntry] = []
        self.link = Link()
        ready = Ready(97, 40, PAGE_SIZE, 320, 4, 4096, 1, [], [LoadedAdapter("x", 0, 8, "hash")])
        self.stepper = Stepper(ready, self.link, None)  # type: ignore[arg-type]
        connections: Any = Connections(None, bytes(16))  # type: ignore[arg-type]
        connections.send = lambda client, message: self.answers.append(message)
        self.requests = OpenRequests(connections)
        self.client: Any = SimpleNamespace(number=1, open={}, closed=False)
        self.adapters = AdapterRequests(
            ServerState(self.stepper), connections, self.requests, True, ["/"], entries, self.saved.append
        )

    def load(self, path: str, content: str, stamp: Stamp | None = None) -> Any:
        """Return the answer."""
        self.answers.clear()
        self.adapters.change(self.client, LoadAdapter(1, "x", path, True, stamp))
        if not self.answers:
            notice = self.link.sent[-1]
            assert isinstance(notice, Load)
            self.adapters.receive_reply(LoadReply(notice.ticket, LoadedAdapter("x", notice.ticket, 8, content)))
        return self.answers[0]

    def unload(self) -> str | None:
        """Return the error code, or None if the GPU process was asked."""
        self.answers.clear()
        self.adapters.change(self.client, UnloadAdapter(1, "x"))
        if self.answers:
            return str(self.answers[0].code)
        assert isinstance(self.link.sent[-1], Unload)
        return None


def test_an_adapter_is_in_use_while_a_prompt_for_it_is_tokenized() -> None:
    server = Server()
    request = server.requests.open(server.client, "r", True, "x")
    assert server.unload() == "adapter_in_use"
    server.requests.close(request, "aborted")
    assert server.unload() is None


def test_an_adapter_is_in_use_while_its_request_waits_runs_or_is_suspected() -> None:
    server = Server()
    stepper = server.stepper
    for name in "ab":
        stepper.engine.add(Request(name, None, [1, 2], SamplingParams(temperature=0, max_tokens=9), "x"), stream=False)
    assert server.unload() == "adapter_in_use", "they wait"
    stepper.submit_steps()
    (load,) = [notice for notice in server.link.sent if isinstance(notice, StartLoad)]
    stepper.finish_load(LoadDone(load.slot, load.number))
    stepper.submit_steps()
    assert server.unload() == "adapter_in_use", "they run"
    stepper.fail_step(server.link.plans[0].step)
    assert server.unload() == "adapter_in_use", "they are suspected"
    for name in "ab":
        stepper.engine.abort(name)
    assert server.unload() is None


def test_a_change_is_the_last_one_also_after_the_clock_was_set_back() -> None:
    future = Stamp(1 << 50, 7, "engine")
    server = Server([AdapterEntry("x", future, "/v1", "one")])
    assert isinstance(server.load("/v2", "two"), Done)
    (entry,) = server.saved
    assert entry.content == "two" and entry.stamp > future


def test_a_change_that_is_older_than_a_forgotten_unload_is_refused() -> None:
    server = Server([AdapterEntry(f"gone{number}", Stamp(100 + number)) for number in range(MAX_TOMBSTONES + 1)])
    answer = server.load("/old", "old", Stamp(99))
    assert answer.code == "adapter_changed" and server.stepper.adapters["x"].content == "hash"
    assert isinstance(server.load("/new", "new", Stamp(101)), Done)
    assert server.stepper.adapters["x"].content == "new"
