"""Engines that are added and removed while a router runs, and adapters that are loaded on demand."""

import asyncio

import pytest
from sidestream.runtime.api.errors import EngineDeadError, ServerError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.metrics.engine_metrics import take_snapshot
from sidestream.runtime.gateway.router.adapter_catalogue import OfferedAdapter
from sidestream.runtime.gateway.router.router import Router
from sidestream.runtime.protocol.addresses import AddressError
from support.fake_runner import continuation
from support.serving import known_model, serve_fake
from support.wire_server import WireServer

PARAMS = SamplingParams(temperature=0, max_tokens=6)


async def tokens(router, name, adapter=None):
    request = EngineRequest(name, [1, 2, 3], PARAMS, adapter)
    return [
        token for chunks in [c async for c in router.stream(request)] for chunk in chunks for token in chunk.token_ids
    ]


async def until(true):
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.01)


@pytest.fixture
def two(tmp_path):
    tmp_path.chmod(0o700)
    with WireServer(f"ipc://{tmp_path}/a") as one, WireServer(f"ipc://{tmp_path}/b") as other:
        yield one, other


def test_a_request_summons_an_engine_and_waits_for_it(two):
    async def run():
        summons = []
        router = Router([], poll_seconds=0.05, request_engine=lambda: summons.append(1))
        await router.start()
        try:
            assert (await router.health()).status == "idle"
            await take_snapshot(router)
            await asyncio.sleep(0.05)
            assert not summons, "a snapshot requests no engine"
            asked = [asyncio.create_task(router.model()), asyncio.create_task(tokens(router, "r"))]
            await until(lambda: summons)
            assert not any(task.done() for task in asked)
            router.add("first", two[0].address)
            model, answer = await asyncio.gather(*asked)
            assert model.name == "fake" and answer == list(range(6))
            with pytest.raises(ValueError, match="exists already"):
                router.add("first", two[1].address)
            with pytest.raises(AddressError):
                router.add("other", "tcp://example.com:5757")
        finally:
            await router.close()

    asyncio.run(run())


def test_patience_ends(tmp_path):
    async def run():
        router = Router([], poll_seconds=0.05, patience_seconds=0.2, request_engine=lambda: None)
        await router.start()
        with pytest.raises(EngineDeadError):
            await tokens(router, "r")
        with pytest.raises(EngineDeadError):
            await router.model()
        await router.close()

    asyncio.run(run())
    with pytest.raises(ValueError, match="at least one"):
        Router([])


def test_an_engine_that_leaves_finishes_and_its_adapters_are_remembered(tmp_path):
    async def run(server, other):
        router = Router([server.address], poll_seconds=0.05, request_engine=lambda: None)
        await router.start()
        try:
            await router.model()
            stream = router.stream(EngineRequest("long", [1, 2], SamplingParams(temperature=0, max_tokens=200), "a1"))
            first = await anext(stream)
            router.remove("engine-0")
            assert (await router.health()).engines == {}
            assert "a1" in {card.name for card in await router.adapters()}, "requests for it wait for an engine"
            rest = [chunk for chunks in [c async for c in stream] for chunk in chunks]
            received = [token for chunk in [*first, *rest] for token in chunk.token_ids]
            assert received == continuation([1, 2], 1, 200, server.vocabulary)
            waiting = asyncio.create_task(tokens(router, "later", "a1"))
            await asyncio.sleep(0.1)
            router.add("engine-1", other.address)
            assert await waiting == continuation([1, 2, 3], 1, 6, server.vocabulary)
            await until(lambda: list(router.counts) == ["engine-1"])
        finally:
            await router.close()

    sizes = {"adapters": 2, "num_slots": 2, "step_seconds": 0.002}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with serve_fake(tmp_path / "a", **sizes) as one, serve_fake(tmp_path / "b", **sizes) as two:
        one.vocabulary = 251
        asyncio.run(run(one, two))


def test_an_offered_adapter_is_loaded_by_the_engine_that_gets_its_first_request(tmp_path):
    root = tmp_path / "root"

    async def run(server):
        router = Router([server.address], poll_seconds=0.05, request_engine=lambda: None)
        (link,) = router._links.values()
        await router.start()
        try:
            await router.model()
            (root / "new").mkdir()
            router.set_offered({"new": OfferedAdapter("new", str(root / "new"), "v1", 8)})
            (card,) = [card for card in await router.adapters() if card.name == "new"]
            assert (card.rank, card.places) == (8, {})
            answers = await asyncio.gather(*(tokens(router, f"r{number}", "new") for number in range(4)))
            assert len({tuple(answer) for answer in answers}) == 1 and link.loaded_versions == {"new": "v1"}
            (card,) = [card for card in await router.adapters() if card.name == "new"]
            assert card.content and "engine-0" in card.places
            router.set_offered({"new": OfferedAdapter("new", str(root / "new"), "v2", 8)})
            await tokens(router, "again", "new")
            assert link.loaded_versions == {"new": "v2"}
            router.set_offered({})
            with pytest.raises(ServerError) as refused:
                await tokens(router, "late", "new")
            assert refused.value.code == "unknown_adapter"
            assert "new" not in {card.name for card in await router.adapters()}
            router.set_offered({"bad": OfferedAdapter("bad", str(tmp_path), "v1", 8)})
            with pytest.raises(ServerError) as refused:
                await tokens(router, "bad", "bad")
            assert refused.value.code == "forbidden", "one request fails, and says why"
        finally:
            await router.close()

    root.mkdir()
    (tmp_path / "e").mkdir()
    with serve_fake(tmp_path / "e", adapters=1, num_slots=4, adapter_roots=[str(root)]) as server:
        asyncio.run(run(server))


def test_a_name_may_be_used_again_while_its_former_engine_finishes(two):
    async def run():
        router = Router([two[0].address], poll_seconds=0.05)
        await router.start()
        try:
            await known_model(router)
            two[0].hold = True
            stream = router.stream(EngineRequest("long", [1, 2, 3], PARAMS))
            await anext(stream)
            router.remove("engine-0")
            router.add("engine-0", two[1].address)
            await until(lambda: router._balancer.status("engine-0") == "ok")
            assert await tokens(router, "new") == list(range(6))
            two[1].hold = True
            held = router.stream(EngineRequest("held", [1, 2, 3], PARAMS))
            await anext(held)
            await stream.aclose()
            assert router._balancer.load("engine-0") == 1 / 64, "the end of the former engine's stream is not its"
            await until(lambda: not router._leaving)
            await held.aclose()
            two[1].hold = False
            assert await tokens(router, "later") == list(range(6))
            assert router.counts["engine-0"].total() == 3 and "engine-0" in await router.stats()
        finally:
            await router.close()

    asyncio.run(run())
