"""Requests whose engines refuse them, stop, differ, or do not answer."""

import asyncio
import contextlib

import pytest
from sidestream.runtime.api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.router.router import Router
from sidestream.runtime.gateway.router.stream_migration import MAX_FRUITLESS_MIGRATIONS
from sidestream.runtime.protocol.framing import encode
from sidestream.runtime.protocol.messages import AdapterInfo, Chunk, Chunks, Error, Usage
from support.wire_server import WireServer

PARAMS = SamplingParams(temperature=0, max_tokens=6)


@contextlib.asynccontextmanager
async def routed(tmp_path, *servers, ok=None, **options):
    """A router over these servers, as soon as `ok` of them (default: all) are in use."""
    router = Router([server.address for server in servers], poll_seconds=0.05, **options)
    await router.start()
    try:
        async with asyncio.timeout(60):
            while [router._balancer.status(name) for name in router._links].count("ok") < (ok or len(servers)):
                await asyncio.sleep(0.01)
        yield router
    finally:
        await router.close()


@pytest.fixture
def two(tmp_path):
    tmp_path.chmod(0o700)
    with WireServer(f"ipc://{tmp_path}/a") as one, WireServer(f"ipc://{tmp_path}/b") as other:
        yield one, other


async def tokens(router, name="r", adapter=None, **fields):
    found = []
    request = EngineRequest(name, [1, 2, 3], PARAMS, adapter, **fields)
    async for chunks in router.stream(request):
        found += [token for chunk in chunks for token in chunk.token_ids]
    return found


def refusing(code, times=1 << 30):
    left = [times]

    def refuse(message):
        left[0] -= 1
        return Error(code, "no", message.request_id, retry_after=7.0) if left[0] >= 0 else None

    return refuse


@pytest.mark.parametrize("code", ["overloaded", "too_many_requests", "draining", "loading", "unknown_adapter"])
def test_a_refused_request_goes_to_another_engine(two, tmp_path, code):
    async def run():
        async with routed(tmp_path, *two) as router:
            two[0].refuse = refusing(code)
            for number in range(4):
                assert await tokens(router, f"r{number}", "pirate") == list(range(6))
            assert len(two[1].submits) == 4

    asyncio.run(run())


def test_when_all_are_busy_a_new_request_is_told_so_at_once(two, tmp_path):
    async def run():
        async with routed(tmp_path, *two) as router:
            for server in two:
                server.refuse = refusing("overloaded")
            with pytest.raises(OverloadedError) as told:
                await tokens(router)
            assert told.value.code == "overloaded" and told.value.retry_after == 7.0
            assert sum(len(server.submits) for server in two) == 2, "each was asked once"

    asyncio.run(run())


def test_a_stream_whose_engine_died_waits_until_another_is_less_busy(two, tmp_path):
    async def run():
        async with routed(tmp_path, *two) as router:
            for server in two:
                server.hold = True
            stream = router.stream(EngineRequest("r", [1, 2, 3], PARAMS))
            assert [chunk.token_ids for chunk in await anext(stream)] == [[0]]
            held, other = two if two[0].submits else two[::-1]
            other.hold, other.refuse = False, refusing("overloaded", 3)
            await asyncio.to_thread(held.die)
            rest = [chunk async for chunks in stream for chunk in chunks]
            assert [token for chunk in rest for token in chunk.token_ids] == [1, 2, 3, 4, 5]
            last = other.submits[-1]
            assert len(other.submits) == 4 and last.continues[0].token_ids == [0] and last.continues[0].characters == 2
            assert rest[-1].usage.first_token_seconds < rest[-1].usage.total_seconds

    asyncio.run(run())


def test_an_answer_that_a_stopping_engine_cuts_goes_on_in_another(two, tmp_path):
    async def run():
        async with routed(tmp_path, *two) as router:
            for server in two:
                server.hold = True
            stream = router.stream(EngineRequest("r", [1, 2, 3], PARAMS))
            await anext(stream)
            held, other = two if two[0].submits else two[::-1]
            other.hold = False
            held.send_raw(encode(Chunks([Chunk("r", 0, 1, "", [], "abort", usage=Usage(3, 1))]), held.instance))
            rest = [token async for chunks in stream for chunk in chunks for token in chunk.token_ids]
            assert rest == [1, 2, 3, 4, 5]

    asyncio.run(run())


def test_a_request_that_every_engine_dies_of_is_not_sent_for_ever(two, tmp_path):
    async def run():
        async with routed(tmp_path, *two) as router:
            for server in two:
                server.refuse = refusing("engine_dead")
            with pytest.raises(EngineDeadError):
                await tokens(router)
            assert sum(len(server.submits) for server in two) == MAX_FRUITLESS_MIGRATIONS + 1

    asyncio.run(run())


def test_what_is_the_requests_own_fault_is_told_at_once(two, tmp_path):
    async def run():
        async with routed(tmp_path, *two) as router:
            for server in two:
                server.refuse = refusing("invalid_request")
            with pytest.raises(RequestError):
                await tokens(router)
            for server in two:
                server.refuse = refusing("request_failed")
            with pytest.raises(ServerError) as told:
                await tokens(router, "s")
            assert told.value.code == "request_failed"
            assert sum(len(server.submits) for server in two) == 2

    asyncio.run(run())


def test_leaving_a_stream_aborts_it_at_its_engine(two, tmp_path):
    async def run():
        async with routed(tmp_path, *two) as router:
            for server in two:
                server.hold = True
            stream = router.stream(EngineRequest("r", [1], PARAMS))
            await anext(stream)
            await stream.aclose()
            async with asyncio.timeout(60):
                while not (two[0].aborts or two[1].aborts):
                    await asyncio.sleep(0.01)
            assert all(router._balancer.load(name) == 0 for name in router._links)

    asyncio.run(run())


def test_an_idle_engines_death_is_noticed_without_a_request(two, tmp_path):
    async def run():
        async with routed(tmp_path, *two) as router:
            await asyncio.to_thread(two[0].die)
            async with asyncio.timeout(60):
                while (await router.health()).engines["engine-0"] != "dead":
                    await asyncio.sleep(0.01)
            assert await tokens(router) == list(range(6)) and len(two[1].submits) == 1
            assert list(await router.stats()) == ["engine-1"]

    asyncio.run(run())


def test_an_engine_of_another_model_is_not_used(tmp_path):
    tmp_path.chmod(0o700)

    async def run(one, other):
        async with routed(tmp_path, one, other, ok=1) as router:
            await asyncio.sleep(0.3)
            for number in range(4):
                await tokens(router, f"r{number}")
            assert {len(one.submits), len(other.submits)} == {0, 4}

    with WireServer(f"ipc://{tmp_path}/a") as one, WireServer(f"ipc://{tmp_path}/b", model="another") as other:
        asyncio.run(run(one, other))


def test_requests_wait_for_the_first_engine_to_come(tmp_path):
    tmp_path.chmod(0o700)

    async def run():
        router = Router([f"ipc://{tmp_path}/late"], poll_seconds=0.05)
        await router.start()
        asked = asyncio.create_task(tokens(router))
        await asyncio.sleep(0.3)
        assert not asked.done()
        with WireServer(f"ipc://{tmp_path}/late", loading=1 << 30) as server:
            async with asyncio.timeout(60):
                while (await router.health()).status != "loading":
                    await asyncio.sleep(0.01)
            assert not asked.done() and (await router.health()).progress == 0.5
            server.loading = 0
            assert await asyncio.wait_for(asked, 60) == list(range(6))
            assert (await router.model()).name == "fake"
            await router.close()

    asyncio.run(run())


def test_an_adapter_that_only_a_restarting_engine_has_is_waited_for(two, tmp_path):
    async def run():
        two[1].adapters = [*two[1].adapters, AdapterInfo("only", 8, "cc", "disk")]
        async with routed(tmp_path, *two) as router:
            await asyncio.to_thread(two[1].die)
            asked = asyncio.create_task(tokens(router, adapter="only"))
            await asyncio.sleep(0.3)
            assert not asked.done()
            cards = {card.name: card for card in await router.adapters()}
            assert cards["only"].places == {"engine-1": "disk"} and cards["pirate"].places["engine-0"] == "gpu"
            with WireServer(two[1].address) as again:
                again.adapters = two[1].adapters
                assert await asyncio.wait_for(asked, 60) == list(range(6))

    asyncio.run(run())
