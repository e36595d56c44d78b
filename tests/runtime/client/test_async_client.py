"""`AsyncClient` against a small server that implements the protocol."""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from sidestream.runtime.api.errors import DeadlineError, EngineDeadError, OverloadedError, RequestError, ServerError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.client.async_client import AsyncClient
from sidestream.runtime.client.connection import Connection
from sidestream.runtime.client.link import ClientLink
from sidestream.runtime.protocol import curve_keys as curve
from sidestream.runtime.protocol import framing
from sidestream.runtime.protocol import messages as protocol
from sidestream.runtime.protocol.messages import Chunk
from support.serving import GUARD, free_port
from support.wire_server import WireServer


@pytest.fixture
def address(tmp_path: Path) -> str:
    (tmp_path / "run").mkdir(mode=0o700)
    return f"ipc://{tmp_path}/run/engine.sock"


@pytest.fixture
def server(address: str) -> Iterator[WireServer]:
    with WireServer(address) as server:
        yield server


def go(work: Awaitable[Any], seconds: float = 300.0) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(limited())


async def until(condition: Callable[[], bool], seconds: float = GUARD) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_stream_brings_every_chunk_in_order_and_ends(server: WireServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.address) as client:
            chunks = [
                chunk
                async for chunk in client.stream(
                    "To be", SamplingParams(max_tokens=5, stop=["x"], logit_bias={3: 1.5}), adapter="pirate"
                )
            ]
            assert "".join(chunk.text for chunk in chunks) == " 0 1 2 3 4"
            assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + ["length"]
            assert chunks[-1].usage is not None and chunks[-1].usage.output_tokens == 5
        asked = server.submits[0]
        assert (asked.prompt, asked.adapter, asked.sampling.stop, asked.sampling.logit_bias) == (
            "To be",
            "pirate",
            ["x"],
            {3: 1.5},
        )
        assert not server.aborts, "a request that has ended is not aborted"

    go(work())


def test_tasks_that_wait_for_a_first_token_run_before_the_others(server: WireServer) -> None:
    server.hold = True

    async def work() -> None:
        order: list[str] = []

        async def listen(request_id: str, started: asyncio.Event, skip: int) -> None:
            async with contextlib.aclosing(client.stream_lists("x", request_id=request_id)) as lists:
                async for _ in lists:
                    started.set()
                    skip -= 1
                    if skip < 0:
                        order.append(request_id)
                        return

        async with AsyncClient(server.address) as client:
            started = [asyncio.Event() for _ in range(2)]
            tasks = [asyncio.create_task(listen(f"old{place}", event, 1)) for place, event in enumerate(started)]
            for event in started:
                await event.wait()
            server.quiet = True
            tasks.append(asyncio.create_task(listen("new", asyncio.Event(), 0)))
            await until(lambda: len(server.submits) == 3)
            chunks = [Chunk("old0", 0, 1, "", [1]), Chunk("old1", 0, 1, "", [1]), Chunk("new", 0, 0, "", [0])]
            server.send_raw(framing.encode(protocol.Chunks(chunks=chunks), server.instance))
            await asyncio.gather(*tasks)
        assert order == ["new", "old0", "old1"]

    go(work())


def test_generate_gives_whole_answers_in_the_order_of_the_prompts(server: WireServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.address) as client:
            prompts = [[1, 2], "text", {"prompt_token_ids": [5]}]
            outputs = await client.generate(
                prompts,
                [SamplingParams(max_tokens=k, n=2, logprobs=0) for k in (1, 2, 3)],
                adapter=[None, "pirate", None],
            )
            assert [output.outputs[1].token_ids for output in outputs] == [[0], [0, 1], [0, 1, 2]]
            assert [output.adapter for output in outputs] == [None, "pirate", None]
            assert [(output.prompt, output.prompt_token_ids) for output in outputs] == [
                (None, [1, 2]),
                ("text", []),
                (None, [5]),
            ]
            assert outputs[2].finished and outputs[2].outputs[0].finish_reason == "length"
            logprobs = outputs[2].outputs[0].logprobs
            assert (
                logprobs is not None
                and [list(place) for place in logprobs] == [[0], [1], [2]]
                and outputs[2].outputs[0].cumulative_logprob == -1.5
            )
            assert len(await client.generate("alone", SamplingParams(max_tokens=1))) == 1
            assert await client.generate([]) == []
            many = await client.generate([[number] for number in range(300)], SamplingParams(max_tokens=1))
            assert [output.prompt_token_ids for output in many] == [[number] for number in range(300)]

    go(work())


def test_calls(server: WireServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.address, name="me") as client:
            assert [(adapter.name, adapter.where) for adapter in await client.list_adapters()] == [
                ("pirate", "gpu"),
                ("shout", "disk"),
            ]
            assert (await client.stats())["adapter_hits_total"] == 3
            assert (await client.health()).status == "ok"
            await client.load_adapter("new", "/adapters/new", replace=True)
            await client.unload_adapter("new")
            with pytest.raises(ServerError, match="root") as caught:
                await client.load_adapter("new", "etc/passwd")
            assert caught.value.code == "forbidden"
            assert (await client.connect()).model == "fake"

    go(work())
    assert isinstance(server.calls[-3], protocol.LoadAdapter) and server.calls[-3].replace


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_request", RequestError),
        ("unknown_adapter", RequestError),
        ("overloaded", OverloadedError),
        ("draining", OverloadedError),
        ("deadline_exceeded", DeadlineError),
        ("request_failed", ServerError),
        ("engine_dead", EngineDeadError),
    ],
)
def test_an_error_ends_its_own_request_only(server: WireServer, code: Any, kind: type[Exception]) -> None:
    def refuse(message: protocol.Submit) -> protocol.Error | None:
        return (
            protocol.Error(code=code, message="because", request_id=message.request_id, retry_after=2.5)
            if message.prompt == "bad"
            else None
        )

    async def work() -> None:
        async with AsyncClient(server.address) as client:
            good = client.stream("good", SamplingParams(max_tokens=3))
            await anext(good)
            with pytest.raises(kind, match="because") as caught:
                await client.generate(["bad"])
            if isinstance(caught.value, ServerError):
                assert (caught.value.code, caught.value.retry_after) == (code, 2.5)
            assert len([chunk async for chunk in good]) == 2

    server.refuse = refuse
    go(work())


def test_leaving_a_stream_aborts_it(server: WireServer) -> None:
    server.hold = True

    async def leave_by_break(client: AsyncClient) -> None:
        async for _ in client.stream("one", request_id="left"):
            break

    async def work() -> None:
        async with AsyncClient(server.address) as client:
            await leave_by_break(client)
            gc.collect()
            await until(lambda: server.aborts == ["left"])

            closed = client.stream("two", request_id="closed")
            await anext(closed)
            await closed.aclose()
            await until(lambda: server.aborts[1:] == ["closed"])

            async def read() -> None:
                async for _ in client.stream("three", request_id="cancelled"):
                    pass

            task = asyncio.create_task(read())
            await until(lambda: len(server.submits) == 3)
            task.cancel()
            await until(lambda: server.aborts[2:] == ["cancelled"])

            task = asyncio.create_task(client.generate(["four", "five"]))
            await until(lambda: len(server.submits) == 5)
            task.cancel()
            await until(lambda: len(server.aborts) == 5)

            with pytest.raises(TimeoutError, match=r"0\.05 s"):
                async for _ in client.stream("six", timeout=0.05):
                    pass
            with pytest.raises(TimeoutError):
                await client.generate("seven", timeout=0.05)
            await until(lambda: len(server.aborts) == 7)
            assert (await client.stats())["pages_in_use"] == 0

    go(work())


def test_an_abort_by_id_ends_the_stream_with_its_reason(server: WireServer) -> None:
    server.hold = True

    async def work() -> None:
        async with AsyncClient(server.address) as client:
            reasons = []
            async for chunk in client.stream("x", request_id="mine"):
                reasons.append(chunk.finish_reason)
                await client.abort("mine")
                await client.abort("unknown")
            assert reasons == [None, "abort"]

    go(work())
    assert server.aborts == ["mine"]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_killed_engine_is_noticed_at_once_and_its_successor_found(address: str, transport: str) -> None:
    async def work(address: str) -> None:
        with WireServer(address, hold=True, silence_seconds=60.0) as first:
            client = AsyncClient(first.address)
            streams = [client.stream("x") for _ in range(5)]
            for stream in streams:
                await anext(stream)
            await asyncio.to_thread(first.die)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="died or was stopped"):  # long before 60 s of silence
                    await anext(stream)
        with WireServer(first.address) as second:
            assert [chunk.text async for chunk in client.stream("again", SamplingParams(max_tokens=2))] == [" 0", " 1"]
            assert [message.prompt for message in second.submits] == ["again"], (
                "what was meant for the dead engine does not reach its successor"
            )
            await client.close()

    with free_port() as port:
        go(work(f"tcp://127.0.0.1:{port}" if transport == "tcp" else address))


def test_a_hanging_engine_is_noticed_by_its_silence(address: str) -> None:
    async def work() -> None:
        with WireServer(address, hold=True, silence_seconds=1.0) as server:
            async with AsyncClient(server.address) as client:
                stream = client.stream("x")
                await anext(stream)
                await until(lambda: server.beats > 5)  # only heartbeats
                server.mute.set()
                with pytest.raises(EngineDeadError, match="sent nothing for"):
                    await anext(stream)

    go(work())


def test_a_program_that_slept_does_not_take_the_engine_for_dead(address: str) -> None:
    async def work() -> None:
        with WireServer(address, hold=True, silence_seconds=1.0) as server:
            async with AsyncClient(server.address) as client:
                stream = client.stream("x", request_id="x")
                await anext(stream)
                time.sleep(1.5)  # blocks the loop on purpose
                await asyncio.sleep(0.3)
                await client.abort("x")
                assert (await anext(stream)).finish_reason == "abort"

    go(work())


def test_a_connection_that_the_server_forgot_is_made_again_for_a_new_request(server: WireServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.address) as client:
            await client.generate("x")
            server.clients.clear()
            outputs = await client.generate("y", SamplingParams(max_tokens=2))
            assert outputs[0].outputs[0].token_ids == [0, 1]
            server.instance = os.urandom(16)
            assert (await client.stats())["adapter_misses_total"] == 1

    go(work())


def test_nothing_there(address: str, tmp_path: Path) -> None:
    async def work() -> None:
        for where in (address, f"ipc://{tmp_path}/nowhere/engine.sock", "tcp://127.0.0.1:1"):
            client = AsyncClient(where, connect_timeout=0.3)
            with pytest.raises(EngineDeadError, match="nothing serves at"):
                await client.generate("x")
            with pytest.raises(EngineDeadError, match="nothing answers"):
                await client.health(timeout=0.1)
            await client.close()
            with pytest.raises(RequestError, match="closed"):
                await client.generate("x")

    go(work())


def test_connect_waits_for_an_engine_that_starts_later_or_still_loads(address: str) -> None:
    async def work() -> None:
        client = AsyncClient(address, connect_timeout=GUARD)
        asked = asyncio.create_task(client.generate("x", SamplingParams(max_tokens=1)))
        await asyncio.sleep(0.3)
        with WireServer(address, loading=10**6) as server:
            assert (await client.health()).status == "loading"
            server.loading = 2
            assert (await asked)[0].finished and not server.loading
            await client.close()
        with WireServer(address, loading=10**6):
            seconds, said = 0.3, ""
            while "still loading" not in said:  # a busy machine may take longer to answer
                client = AsyncClient(address, connect_timeout=seconds)
                with pytest.raises(EngineDeadError) as caught:
                    await client.connect()
                await client.close()
                said, seconds = str(caught.value), 4 * seconds
                assert seconds < GUARD, said

    go(work())


@pytest.mark.parametrize(
    "frame", [b"", b"hello", b"SS\x00\x02" + bytes(16) + b"\x80", b"SS\x00\x01" + bytes(16) + b"\xc1", b"random"]
)
def test_nonsense_from_the_server_ends_the_connection_with_a_clear_error(address: str, frame: bytes) -> None:
    async def work() -> None:
        with WireServer(address, hold=True) as server:
            async with AsyncClient(server.address) as client:
                stream = client.stream("x")
                await anext(stream)
                server.send_raw(os.urandom(300) if frame == b"random" else frame)
                with pytest.raises(ServerError, match="protocol") as caught:
                    await anext(stream)
                assert caught.value.code in ("bad_frame", "unsupported_version")
                server.hold = False
                assert (await client.generate("y"))[0].finished

    go(work())


def test_a_gap_in_a_stream_is_an_error_of_that_stream(server: WireServer) -> None:
    server.hold = True

    async def work() -> None:
        async with AsyncClient(server.address) as client:
            stream = client.stream("x", request_id="x")
            await anext(stream)
            lost = protocol.Chunk("x", 0, 7, "?", [7])
            server.send_raw(framing.encode(protocol.Chunks(chunks=[lost]), server.instance))
            with pytest.raises(ServerError, match="did not arrive"):
                await anext(stream)
            await until(lambda: server.aborts == ["x"])
            server.hold = False
            assert (await client.generate("y"))[0].finished

    go(work())


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        5,
        [1, -1],
        [2**31],
        {"prompt": "a", "prompt_token_ids": [1]},
        "x" * (protocol.MAX_PROMPT_CHARACTERS + 1),
        "\ud800",
        b"x",
    ],
    ids=["empty", "number", "negative", "above int32", "both", "too long", "surrogate", "bytes"],
)
def test_a_prompt_that_cannot_travel_is_refused_here(server: WireServer, prompt: Any) -> None:
    async def work() -> None:
        async with AsyncClient(server.address) as client:
            with pytest.raises(RequestError):
                async for _ in client.stream(prompt):
                    pass
            assert (await client.generate("y"))[0].finished

    go(work())
    assert len(server.submits) == 1


class WithoutQueue:
    """A socket whose server has refused it."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)

    def send(self, *_: Any) -> None:
        raise zmq.Again


def test_curve_end_to_end(tmp_path: Path) -> None:
    (friend,) = curve.generate(tmp_path / "keys", ["friend"])
    (stranger,) = curve.generate(tmp_path / "other", ["stranger"])
    (stranger / "server.public").write_bytes((friend / "server.public").read_bytes())
    open_link = Connection._open_link

    def open_until_refused(self: Connection) -> ClientLink:
        """The refusal arrives before the first message is sent, and there is no queue for it any more."""
        link = open_link(self)
        link._monitor.poll(60_000)
        time.sleep(0.5)
        link._socket = WithoutQueue(link._socket)  # type: ignore[assignment]
        return link

    async def work() -> None:
        with WireServer("tcp://127.0.0.1:*", keys=curve.load_server_keys(tmp_path / "keys" / "server")) as server:
            async with AsyncClient(server.address, keys=friend) as client:
                assert (await client.generate("x"))[0].finished
            refused, refused_again = (AsyncClient(server.address, keys=stranger) for _ in range(2))
            with pytest.raises(ServerError, match="does not admit"):
                await refused.connect()
            await refused.close()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Connection, "_open_link", open_until_refused)
                with pytest.raises(ServerError, match="does not admit"):
                    await refused_again.connect()
            await refused_again.close()
            plain = AsyncClient(server.address, connect_timeout=0.5)
            with pytest.raises(ServerError):
                await plain.connect()
            await plain.close()

    go(work())


def test_a_client_of_another_event_loop_is_refused(server: WireServer) -> None:
    client = AsyncClient(server.address)
    with asyncio.Runner() as first:
        assert first.run(client.health()).status == "ok"
        with pytest.raises(RequestError, match=r"another event loop; make one in each asyncio\.run"):
            go(client.health())
        assert first.run(client.health()).status == "ok"
        first.run(client.close())


def test_beyond_the_loopback_a_client_needs_keys() -> None:
    with pytest.raises(ValueError, match="keys curve"):
        AsyncClient("tcp://gpu-host:5757")


def test_no_socket_stays_behind(server: WireServer) -> None:
    def sockets() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def once() -> None:
        async with AsyncClient(server.address) as client:
            await client.generate("x")

    go(once())
    before = sockets()
    for _ in range(10):
        go(once())
    deadline = time.monotonic() + GUARD
    while sockets() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sockets() <= before + 2
