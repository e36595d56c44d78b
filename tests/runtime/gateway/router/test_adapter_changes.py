"""Two gateways and three engines change adapters at once, with delays, losses, restarts and refusals.

The map, the engines' checks and the routers are the real ones (`support.adapter_world`). All engines end equal, no
acknowledged change is lost, and no version answers that is older than an acknowledged one. On 16 cores:

    python -m pytest tests/runtime/gateway/router/test_adapter_changes.py --exhaustive -n 16
"""

import asyncio
import logging
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sidestream.runtime.api.errors import RequestError, ServerError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.router.router import Router
from sidestream.runtime.protocol.adapter_map import AdapterEntry, Stamp
from sidestream.runtime.protocol.messages import Adapters, ListAdapters
from sidestream.runtime.server.adapter_requests import AdapterRequests
from sidestream.tools.dev.chaos.adapter_changes import Change, possible
from support.adapter_world import EPOCH, World, world

ENGINES, GATEWAYS = 3, 2
NAMES = st.sampled_from(["x", "y"])
PATHS = st.sampled_from(["/v1", "/v2", "/v3"])
GATEWAY, ENGINE = st.integers(0, GATEWAYS - 1), st.integers(0, ENGINES - 1)
SETTLE = 12.0
RUNS, EXHAUSTIVE_RUNS, SHARDS = 200, 10_000, 16


def content(path: str | None) -> str | None:
    return None if path is None else f"content of {path}"


@dataclass
class Answer:
    name: str
    router: Router
    started: float
    ended: float
    value: str


class Changes(RuleBasedStateMachine):
    """Starts operations, and lets time go on between them."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.world = World(ENGINES, GATEWAYS, seed)
        self.engines = list(self.world.engines.values())
        self.changes: dict[str, list[Change]] = {"x": [], "y": []}
        self.answers: list[Answer] = []
        self.versions = 0
        self.tasks: list[asyncio.Task[None]] = []

    def version(self, path: str) -> str:
        """Return a directory whose content occurs only once."""
        self.versions += 1
        return f"{path}-{self.versions}"

    @property
    def now(self) -> float:
        return self.world.loop.time()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(self.world.loop.create_task(work))
        self.world.advance(0.0)

    async def change(self, name: str, path: str | None, work: Coroutine[Any, Any, None], everywhere: bool) -> None:
        change = Change(content(path), self.now, everywhere=everywhere)
        self.changes[name].append(change)
        try:
            await work
        except (RequestError, ServerError, TimeoutError):
            change.ended = self.now
        else:
            change.ended = change.acknowledged = self.now

    @rule(gateway=GATEWAY, name=NAMES, path=PATHS, replace=st.sampled_from([True, True, False]))
    def load(self, gateway: int, name: str, path: str, replace: bool) -> None:
        path = self.version(path)
        self.run(self.change(name, path, self.world.routers[gateway].load_adapter(name, path, replace), True))

    @rule(gateway=GATEWAY, name=NAMES)
    def unload(self, gateway: int, name: str) -> None:
        self.run(self.change(name, None, self.world.routers[gateway].unload_adapter(name), True))

    @rule(engine=ENGINE, name=NAMES, path=st.one_of(PATHS, st.none()))
    def change_at_engine(self, engine: int, name: str, path: str | None) -> None:
        client = self.world.client(self.engines[engine])
        path = None if path is None else self.version(path)
        work = client.unload_adapter(name) if path is None else client.load_adapter(name, path, replace=True)
        self.run(self.change(name, path, work, False))

    @rule(gateway=GATEWAY, name=NAMES, path=PATHS)
    def load_and_ask(self, gateway: int, name: str, path: str) -> None:
        """Ask all gateways as soon as the change is acknowledged, and again for a while."""
        self.run(self._load_and_ask(gateway, name, self.version(path)))

    async def _load_and_ask(self, gateway: int, name: str, path: str) -> None:
        await self.change(name, path, self.world.routers[gateway].load_adapter(name, path, True), True)
        for _ in range(6):
            await asyncio.gather(*(self._ask(router, name) for router in self.world.routers))
            await asyncio.sleep(0.1)

    @rule(gateway=GATEWAY, name=NAMES)
    def ask(self, gateway: int, name: str) -> None:
        self.run(self._ask(self.world.routers[gateway], name))

    async def _ask(self, router: Router, name: str) -> None:
        started = self.now
        request = EngineRequest(f"r{started}", [1], SamplingParams(max_tokens=1), name)
        try:
            async for chunks in router.stream(request):
                for chunk in chunks:
                    self.answers.append(Answer(name, router, started, self.now, chunk.text))
        except (RequestError, ServerError):
            pass

    @rule(engine=ENGINE, seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def restart(self, engine: int, seconds: float) -> None:
        if not self.engines[engine].up:
            return
        self.engines[engine].stop()
        self.world.loop.call_later(seconds, self.engines[engine].start)

    @rule(engine=ENGINE, seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def restart_gpu(self, engine: int, seconds: float) -> None:
        if self.engines[engine].up:
            self.engines[engine].restart_gpu(seconds)

    @precondition(lambda self: all(each.up for each in self.engines))
    @rule(engine=ENGINE)
    def replace_instance(self, engine: int) -> None:
        """A new instance starts empty; the others know everything."""
        self.finish()
        self.world.advance(SETTLE)
        self.engines[engine].stop()
        self.engines[engine].saved.clear()
        self.engines[engine].start()

    @rule(gateway=GATEWAY, engine=ENGINE, seconds=st.sampled_from([0.0, 0.7]))
    def cut(self, gateway: int, engine: int, seconds: float) -> None:
        list(self.world.routers[gateway]._links.values())[engine].client.cut(seconds)  # type: ignore[attr-defined]
        self.world.advance(0.0)

    @rule(engine=ENGINE, path=PATHS)
    def make_unreadable(self, engine: int, path: str) -> None:
        self.engines[engine].unreadable ^= {path}

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.4, 1.0, 3.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    def finish(self) -> None:
        for engine in self.engines:
            engine.unreadable.clear()
        if self.tasks:
            self.world.loop.run_until_complete(asyncio.wait(self.tasks))
        while self.tasks:
            self.tasks.pop().result()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.finish()
            self.world.advance(SETTLE)
            self.check()
        finally:
            self.world.close()

    def check(self) -> None:
        maps = [engine.adapters._map.entries for engine in self.engines]
        assert maps[0] == maps[1] == maps[2], maps
        for engine in self.engines:
            loaded = {name: entry.content for name, entry in maps[0].items() if entry.path is not None}
            assert {name: each.content for name, each in engine.stepper.adapters.items()} == loaded
        for name, changes in self.changes.items():
            value = content(maps[0][name].path) if name in maps[0] else None
            allowed = possible(changes, math.inf, math.inf, everywhere=False)
            assert value in allowed, f"{name} ended as {value}, not as one of {allowed}: {changes}"
        for answer in self.answers:
            allowed = possible(self.changes[answer.name], answer.started, answer.ended, everywhere=True)
            assert answer.value in allowed, f"{answer} is none of {allowed}: {self.changes[answer.name]}"
        for earlier in self.answers:
            for later in self.answers:
                if (earlier.name, earlier.router) == (later.name, later.router) and earlier.ended < later.started:
                    self.check_order(earlier, later)

    def check_order(self, earlier: Answer, later: Answer) -> None:
        """After a version has answered at a gateway, no former one does, unless its change failed."""
        by_value = {change.value: change for change in self.changes[later.name]}
        new, old = by_value[earlier.value], by_value[later.value]
        assert not (old.precedes(new) and new.acknowledged < math.inf), f"{later} after {earlier}"


def test_a_version_that_a_refused_load_replaced_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """One gateway's load is refused by the engine that another client changes; the other gateway passes it on."""
    caplog.set_level(logging.CRITICAL)
    for start in range(40):
        changes = Changes()
        changes.begin(seed=start)
        changes.advance(seconds=0.1)
        changes.change_at_engine(engine=0, name="y", path="/v1")
        changes.load(gateway=0, name="y", path="/v1", replace=False)
        changes.teardown()


@pytest.mark.parametrize("shard", range(SHARDS))
def test_changes_at_once_lose_nothing_and_mix_nothing(
    pytestconfig: pytest.Config, caplog: pytest.LogCaptureFixture, shard: int
) -> None:
    """Run 200 examples, and 10,000 with --exhaustive. Processes of pytest-xdist share the shards."""
    is_exhaustive = pytestconfig.getoption("--exhaustive")
    if shard and not is_exhaustive:
        pytest.skip("only the first shard runs without --exhaustive")
    caplog.set_level(logging.CRITICAL)  # each loss is logged
    machine = type("Changes", (Changes,), {})
    run_state_machine_as_test(
        seed(shard)(machine) if is_exhaustive else machine,
        settings=settings(
            max_examples=EXHAUSTIVE_RUNS // SHARDS if is_exhaustive else RUNS,
            stateful_step_count=25,
            deadline=None,
            derandomize=not is_exhaustive,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def answer_of(made: World, gateway: int, name: str) -> str:
    async def ask() -> str:
        request = EngineRequest("r", [1], SamplingParams(max_tokens=1), name)
        return "".join([chunk.text async for chunks in made.routers[gateway].stream(request) for chunk in chunks])

    return made.loop.run_until_complete(ask())


def test_a_gateway_follows_a_change_of_another_one_at_once() -> None:
    with world(2, 2) as made:
        run = made.loop.run_until_complete
        run(made.routers[0].load_adapter("x", "/v1", False))
        assert answer_of(made, 1, "x") == "content of /v1"
        run(made.routers[1].load_adapter("x", "/v2", True))
        assert answer_of(made, 0, "x") == "content of /v2", "without a poll in between"
        made.advance(5)
        assert {answer_of(made, gateway, "x") for gateway in (0, 1) for _ in range(4)} == {"content of /v2"}
        run(made.routers[0].unload_adapter("x"))
        for gateway in (0, 1):
            with pytest.raises(ServerError, match="not known"):
                answer_of(made, gateway, "x")


def test_a_version_that_one_engine_refuses_is_undone_on_all_and_the_engine_named() -> None:
    with world(3, 1) as made:
        run = made.loop.run_until_complete
        list(made.engines.values())[1].unreadable.add("/v2")
        for before in (None, "/v1"):
            if before is not None:
                run(made.routers[0].load_adapter("x", before, False))
            with pytest.raises(ServerError, match=r"refused by engine-1: .*No such file.*; the change was undone"):
                run(made.routers[0].load_adapter("x", "/v2", True))
            contents = [engine.stepper.adapters.get("x") for engine in made.engines.values()]
            assert {None if each is None else each.content for each in contents} == {content(before)}


def test_a_change_of_a_client_during_one_that_is_undone_remains() -> None:
    """The refused one has the later stamp; what the client changed was in progress."""
    undone = 0
    for number in range(8):
        with world(2, 1, number) as made:
            first, other = made.engines.values()
            first.unreadable.add("/v2")
            link = other.stepper.link
            link.send = lambda notice, made=made, other=other: made.loop.call_later(  # type: ignore[method-assign]
                1.0, other._reply, notice, other.gpu_life
            )
            made.advance(0.2)
            client = made.loop.create_task(made.client(other).load_adapter("x", "/v1"))
            made.advance(0.2)
            load = made.loop.create_task(made.routers[0].load_adapter("x", "/v2", number % 2 == 0))
            made.loop.run_until_complete(asyncio.wait([client, load]))
            client.result()
            undone += "undone" in str(load.exception())
            made.advance(8.0)
            for engine in made.engines.values():
                assert engine.stepper.adapters["x"].content == "content of /v1", number
    assert undone


def test_an_engine_whose_gpu_process_restarts_during_a_change_serves_no_former_version_behind_another_gateway() -> None:
    for number in range(8, 14):
        with world(2, 2, number) as made:
            made.loop.run_until_complete(made.routers[0].load_adapter("x", "/v1", False))
            made.advance(2.0 + number * 0.037)
            engine = next(iter(made.engines.values()))
            engine.restart_gpu(1.0)
            made.advance(0.6 + number * 0.0131)
            change = made.loop.create_task(made.routers[0].load_adapter("x", "/v2", True))
            other = made.routers[1]
            while not change.done() or other._links["engine-0"].status != "ok":
                assert made.loop.time() < 60
                made.advance(0.005)
            required = other._catalogue.required_content("x")
            assert "content of /v2" in (required, engine.stepper.adapters["x"].content), number
            change.result()


def test_an_engine_whose_gpu_process_restarts_gets_the_changes_of_the_others_before_its_first_request() -> None:
    late = 0
    for number in range(8):
        with world(2, 1, number) as made:
            engine, other = made.engines.values()
            made.loop.run_until_complete(made.routers[0].load_adapter("x", "/v1", False))
            made.advance(2.0)
            engine.restart_gpu(1.0)
            made.advance(0.7 + 0.03 * number)
            made.loop.run_until_complete(made.client(other).load_adapter("x", "/v2", replace=True))
            link = made.routers[0]._links["engine-0"]
            if link.status != "loading":
                continue
            late += 1
            while link.status != "ok":
                assert made.loop.time() < 60
                made.advance(0.005)
            assert made.routers[0]._catalogue.required_content("x") == "content of /v2", number
    assert late


def test_an_engine_that_only_another_gateway_reaches_serves_no_former_version_however_long() -> None:
    for number in range(4):
        with world(2, 2, number) as made:
            made.loop.run_until_complete(made.routers[0].load_adapter("x", "/v1", False))
            made.routers[0]._links["engine-0"].client.cut(1000.0)  # type: ignore[attr-defined]
            made.advance(30.0)
            made.loop.run_until_complete(made.routers[0].load_adapter("x", "/v2", True))
            assert {answer_of(made, 1, "x") for _ in range(8)} == {"content of /v2"}


def test_an_adapter_that_no_engine_can_read_any_more_is_unloaded() -> None:
    with world(1, 1) as made:
        run, (engine,) = made.loop.run_until_complete, made.engines.values()
        run(made.routers[0].load_adapter("x", "/v1", False))
        engine.unreadable.add("/v1")
        engine.restart_gpu(0.1)
        made.advance(2.0)
        with pytest.raises(ServerError, match="not known"):
            answer_of(made, 0, "x")
        run(made.routers[0].unload_adapter("x"))
        assert engine.saved["x"].path is None
        with pytest.raises(ServerError, match="not known"):
            run(made.routers[0].unload_adapter("x"))


def test_a_change_behind_one_of_the_far_future_is_not_acknowledged() -> None:
    with world(1, 1) as made:
        run, (engine,) = made.loop.run_until_complete, made.engines.values()
        future = Stamp(int((EPOCH + 3600) * 1000), 0, "engine")
        engine.stop()
        engine.saved["x"] = AdapterEntry("x", future, "/v1", "content of /v1")
        engine.start()
        made.advance(2.0)
        for change in (made.routers[0].load_adapter("x", "/v2", True), made.routers[0].unload_adapter("x")):
            with pytest.raises(ServerError, match=r"'x': its last change on engine-0 is over 60 s ahead") as raised:
                run(change)
            assert raised.value.code == "adapter_changed"
        run(made.routers[0].load_adapter("y", "/v2", False))


def test_a_router_keeps_nothing_of_names_that_do_not_exist() -> None:
    with world(1, 1) as made:
        for number in range(9):
            with pytest.raises(ServerError, match="not known"):
                made.loop.run_until_complete(made.routers[0].unload_adapter(f"x{number}"))
        assert not made.routers[0]._changes.locks


def test_a_new_engine_gets_the_adapters_before_its_first_request() -> None:
    with world(2, 1) as made:
        made.loop.run_until_complete(made.routers[0].load_adapter("x", "/v1", False))
        engine = next(iter(made.engines.values()))
        engine.stop()
        engine.saved.clear()
        engine.start()
        link = made.routers[0]._links["engine-0"]
        while link.status != "ok":
            assert made.loop.time() < 60
            made.advance(0.01)
        assert engine.stepper.adapters["x"].content == "content of /v1"


def test_a_gateway_asks_the_engines_before_it_refuses_a_name() -> None:
    with world(2, 2) as made:
        run, other = made.loop.run_until_complete, made.routers[1]
        for path in ("/v1", "/v2"):
            assert run(other.adapter("x")) is None
            run(made.routers[0].load_adapter("x", path, False))
            card = run(other.adapter("x"))
            assert card is not None and card.content == content(path)
            assert answer_of(made, 1, "x") == content(path)
            run(made.routers[0].unload_adapter("x"))


def test_requests_for_unknown_names_share_their_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(2, 1) as made:
        queries = 0
        ask = AdapterRequests.list

        def counted(adapters: AdapterRequests, message: ListAdapters) -> Adapters:
            nonlocal queries
            queries += 1
            return ask(adapters, message)

        monkeypatch.setattr(AdapterRequests, "list", counted)

        async def many() -> None:
            assert set(await asyncio.gather(*(made.routers[0].adapter(f"x{each}") for each in range(500)))) == {None}

        made.loop.run_until_complete(many())
        assert queries <= 8, "two for each engine, and polls"


def test_an_engine_that_is_stalled_delays_no_refusal() -> None:
    with world(2, 1) as made:
        made.routers[0]._links["engine-0"].client._delay = lambda: asyncio.sleep(600)  # type: ignore[attr-defined]
        started = made.loop.time()
        assert made.loop.run_until_complete(made.routers[0].adapter("x")) is None
        assert made.loop.time() - started < 2


def test_a_slow_load_of_a_passed_on_change_does_not_delay_the_health_of_its_engine() -> None:
    with world(2, 1) as made:
        slow, other = made.engines.values()
        slow.stepper.link.send = lambda notice: made.loop.call_later(300.0, slow._reply, notice, slow.gpu_life)
        made.loop.run_until_complete(made.client(other).load_adapter("x", "/v1"))
        made.advance(3.0)
        assert slow.adapters._pending, "it is being loaded"
        link = made.routers[0]._links["engine-0"]
        slow.state.draining = True
        made.advance(2.0)
        assert link.status == "draining"
        slow.state.draining = False
        made.advance(300.0)
        assert link.adapters["x"].content == "content of /v1"


def test_a_router_forgets_the_adapters_of_removed_engines() -> None:
    with world(3, 1) as made:
        router = made.routers[0]

        async def replace_engine(name: str) -> None:
            await router.load_adapter(name, "/v1", False)
            router.remove("engine-1")
            assert set(router._former_adapters) == {name}
            await router.unload_adapter(name)
            router.add("engine-1", "ipc:///e1")
            await asyncio.sleep(3.0)

        for number in range(5):
            made.loop.run_until_complete(replace_engine(f"x{number}"))
