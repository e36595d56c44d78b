"""A paused server plans no steps; what happens to open requests depends on the mode."""

import asyncio
import time

import pytest
from sidestream.runtime.api.errors import ServerError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.router.router import Router
from sidestream.runtime.protocol.messages import Done, Error, GetStats, Pause, Resume, Sampling
from support.fake_runner import continuation
from support.serving import Server, known_model, serve_fake

VOCABULARY = 251
PROMPT = [7, 1, 9]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve_fake(tmp_path_factory.mktemp("paused"), adapters=2, step_seconds=0.002) as server:
        yield server


@pytest.fixture
def wire(server: Server):
    with server.connect() as wire:
        yield wire
        assert isinstance(wire.call(Resume(99)), Done)


def sampling(count: int, **fields) -> Sampling:
    return Sampling(temperature=0.0, ignore_eos=True, max_tokens=count, **fields)


def steps(wire) -> int:
    return wire.call(GetStats(5)).values["steps_total"]


def test_open_and_new_requests_wait_for_the_end_of_a_pause(server, wire):
    with server.held(beyond=20):
        wire.submit("open", sampling(400), prompt_token_ids=PROMPT)
        wire.until(lambda: len(wire.answers["open"].token_ids.get(0, ())) > 5)
        assert isinstance(wire.call(Pause(1)), Done)
    wire.until(lambda: wire.call(GetStats(6)).values["steps_in_flight"] == 0)
    before = steps(wire)
    wire.submit("new", sampling(5), prompt_token_ids=PROMPT, adapter="a1")
    wire.until(lambda: wire.answers["new"].accepted is not None)
    time.sleep(0.1)  # fifty steps
    assert steps(wire) == before and not wire.answers["new"].chunks and not wire.answers["open"].over
    assert wire.call(GetStats(2)).values["paused"] == 1
    assert isinstance(wire.call(Resume(3)), Done)
    assert wire.answer("new").token_ids[0] == continuation(PROMPT, 1, 5, VOCABULARY)
    assert wire.answer("open").token_ids[0] == continuation(PROMPT, -1, 400, VOCABULARY)
    assert wire.call(GetStats(4)).values["paused"] == 0


def test_a_pause_that_aborts_ends_open_requests(server, wire):
    with server.held(beyond=20):
        wire.submit("open", sampling(400), prompt_token_ids=PROMPT)
        wire.until(lambda: bool(wire.answers["open"].chunks))
        assert isinstance(wire.call(Pause(1, abort=True)), Done)
    assert wire.answer("open").error.code == "aborted"
    wire.submit("new", sampling(5), prompt_token_ids=PROMPT)
    wire.call(Resume(2))
    assert wire.answer("new").token_ids[0] == continuation(PROMPT, -1, 5, VOCABULARY)


def test_deadlines_pass_and_requests_can_be_left_in_a_pause(server, wire):
    wire.call(Pause(1))
    with server.connect() as other:
        other.submit("left", sampling(4), prompt_token_ids=PROMPT)
        other.until(lambda: other.answers["left"].accepted is not None)
    wire.submit("late", sampling(4), prompt_token_ids=PROMPT, deadline_seconds=0.05)
    assert wire.answer("late").error.code == "deadline_exceeded"
    wire.until(lambda: wire.call(GetStats(2)).values["requests_open"] == 0)


def test_a_new_gpu_process_is_paused_too(server):
    with server.connect() as wire:
        wire.call(Pause(1))
        server.replace("fake_gpu")
    with server.connect() as wire:
        wire.submit("new", sampling(3), prompt_token_ids=PROMPT)
        wire.until(lambda: wire.answers["new"].accepted is not None)
        assert steps(wire) == 0 and not wire.answers["new"].chunks
        wire.call(Resume(2))
        assert wire.answer("new").token_ids[0] == continuation(PROMPT, -1, 3, VOCABULARY)


def test_a_server_without_admins_cannot_be_paused(tmp_path):
    with serve_fake(tmp_path, admin=False) as server, server.connect() as wire:
        for message in (Pause(1), Resume(2)):
            refused = wire.call(message)
            assert isinstance(refused, Error) and refused.code == "forbidden"
        wire.submit("a", sampling(3), prompt_token_ids=PROMPT)
        assert wire.answer("a").token_ids[0] == continuation(PROMPT, -1, 3, VOCABULARY)


def test_a_gateway_can_finish_open_requests_before_a_pause(server):
    """New ones wait, and are answered after the pause."""

    async def answer(router, name, count, begun=None):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count)
        tokens = []
        async for chunks in router.stream(EngineRequest(name, PROMPT, params)):
            tokens += [token for chunk in chunks for token in chunk.token_ids]
            if begun is not None:
                begun.set()
        return tokens

    async def run():
        router = Router([server.address], poll_seconds=0.05)
        await router.start()
        await known_model(router)
        try:
            begun = asyncio.Event()
            first = asyncio.create_task(answer(router, "first", 200, begun))
            await begun.wait()
            pausing = asyncio.create_task(router.pause("wait"))
            await asyncio.sleep(0)
            second = asyncio.create_task(answer(router, "second", 4))
            await pausing
            assert first.done() and await first == continuation(PROMPT, -1, 200, VOCABULARY)
            assert (await router.stats())["engine-0"]["paused"] == 1 and not second.done()
            await router.resume()
            assert await second == continuation(PROMPT, -1, 4, VOCABULARY)
            begun.clear()
            with server.held(beyond=20):
                third = asyncio.create_task(answer(router, "third", 400, begun))
                await begun.wait()  # a pause does not abort a request that has not reached the engine
                await router.pause("abort")
            with pytest.raises(ServerError) as problem:
                await third
            assert problem.value.code == "aborted"
            await router.resume()
        finally:
            await router.close()

    asyncio.run(run())


def test_a_resume_ends_the_wait_for_open_requests(server):
    async def run():
        router = Router([server.address], poll_seconds=0.05)
        await router.start()
        await known_model(router)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)
        stream = router.stream(EngineRequest("long", PROMPT, params))
        try:
            with server.held(beyond=20):
                await anext(stream)
                pausing = asyncio.create_task(router.pause("wait"))
                await asyncio.sleep(0.01)
                await router.resume()
                await pausing
                assert (await router.stats())["engine-0"]["paused"] == 0
            await anext(stream)
        finally:
            await stream.aclose()
            await router.close()

    asyncio.run(run())
