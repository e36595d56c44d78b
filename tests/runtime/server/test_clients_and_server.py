"""The clients against a whole server (batcher and a simulated GPU process)."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from sidestream.runtime.api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.client.async_client import AsyncClient
from sidestream.runtime.client.client import Client
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.processes.channel import Channel
from sidestream.runtime.protocol import curve_keys as curve
from sidestream.runtime.server.settings import ServeSettings
from support.fake_runner import continuation
from support.serving import GUARD, Server, free_port, serve_fake

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SIZES = {"max_num_seqs": 16, "num_pages": 256, "num_slots": 2, "max_model_len": 512, "step_seconds": 0.003}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_fake(tmp_path_factory.mktemp("served"), adapters=3, **SIZES) as server:
        yield server


def test_answers_are_right_for_every_adapter(server: Server) -> None:
    with Client(server.address, connect_timeout=GUARD) as client:
        prompts = [[number, 7, number] for number in range(40)]
        adapters = [None if number % 4 == 3 else f"a{number % 4}" for number in range(40)]
        outputs = client.generate(prompts, GREEDY, adapter=adapters)
        for prompt, adapter, output in zip(prompts, adapters, outputs, strict=True):
            expected = continuation(prompt, -1 if adapter is None else int(adapter[1:]), 6, 251)
            assert output.outputs[0].token_ids == expected
        streamed = [token for chunk in client.stream(prompts[0], GREEDY, adapters[0]) for token in chunk.token_ids]
        assert streamed == outputs[0].outputs[0].token_ids
        several = client.generate([prompts[1]], SamplingParams(n=3, max_tokens=5, seed=1, ignore_eos=True))[0]
        assert [len(choice.token_ids) for choice in several.outputs] == [5, 5, 5]


def test_faults_are_told_to_whom_they_belong(server: Server) -> None:
    with Client(server.address, connect_timeout=GUARD) as client:
        stream = client.stream([1, 2], LONG)
        next(stream)
        for call in (
            lambda: client.generate([[1]], GREEDY, adapter="nobody"),
            lambda: client.generate([[10**6]], GREEDY),
            lambda: client.generate([[1] * 600], GREEDY),
        ):
            with pytest.raises(RequestError):
                call()
        with pytest.raises((ServerError, RequestError)):
            client.load_adapter("x", "/no/such/folder")
        assert sum(len(chunk.token_ids) for chunk in stream) == 399


def test_a_client_that_leaves_leaves_no_pages(server: Server) -> None:
    async def work() -> None:
        async with AsyncClient(server.address, connect_timeout=GUARD) as client:

            async def one(number: int) -> None:
                async with contextlib.aclosing(client.stream([number, 1, 2], LONG, f"a{number % 3}")) as chunks:
                    await anext(chunks)
                    await asyncio.sleep(0.001 * number)

            await asyncio.gather(*(one(number) for number in range(60)))
            tasks = [asyncio.create_task(client.generate([[number]], LONG)) for number in range(30)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            deadline = time.monotonic() + GUARD
            while (values := await client.stats())["pages_in_use"] or values["requests_open"]:
                assert time.monotonic() < deadline, values
                await asyncio.sleep(0.02)

    asyncio.run(work())


def test_death_and_drain_are_told(tmp_path: Path) -> None:
    with (
        serve_fake(tmp_path, drain_seconds=GUARD, **SIZES) as server,
        Client(server.address, connect_timeout=GUARD) as client,
    ):
        with server.held(beyond=20):
            stream = client.stream([1, 2], LONG)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + GUARD
            while client.health().status != "draining":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with pytest.raises(OverloadedError) as refused:
                client.generate([[1]], SamplingParams(max_tokens=1))
        assert refused.value.code == "draining"
        assert sum(len(chunk.token_ids) for chunk in stream) == 399, "what is open is finished"
        server.process.wait(GUARD)

    (tmp_path / "second").mkdir()
    with serve_fake(tmp_path / "second", **SIZES) as server, Client(server.address, connect_timeout=GUARD) as client:
        with server.held(beyond=20):
            stream = client.stream([1, 2], LONG)
            next(stream)
            os.kill(server.child("server.batcher"), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            list(stream)


def test_curve_over_tcp(tmp_path: Path) -> None:
    (friend,) = curve.generate(tmp_path / "keys", ["friend"])
    (stranger,) = curve.generate(tmp_path / "other", ["stranger"])
    (stranger / "server.public").write_bytes((friend / "server.public").read_bytes())
    with (
        free_port() as port,
        serve_fake(tmp_path, bind=f"tcp://127.0.0.1:{port}", keys=str(tmp_path / "keys" / "server"), **SIZES) as server,
    ):
        with Client(server.address, keys=friend, connect_timeout=GUARD) as client:
            assert client.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids == continuation([1, 2], -1, 6, 251)
        with (
            pytest.raises(ServerError, match="does not admit"),
            Client(server.address, keys=stranger, connect_timeout=GUARD),
        ):
            pass
        with pytest.raises(ServerError), Client(server.address, connect_timeout=1):
            pass


@pytest.mark.parametrize(("folder", "code"), [("clients", 1), ("file/clients", 2)], ids=["bound", "failed"])
def test_a_batcher_whose_supervisor_is_gone_ends_without_a_traceback(tmp_path: Path, folder: str, code: int) -> None:
    ours, theirs = Channel.pair()
    (tmp_path / "server").mkdir(mode=0o700)
    (tmp_path / "file").touch()  # below which nothing can be made
    bind = f"ipc://{tmp_path}/{folder}/s.sock"
    settings = ServeSettings(model=str(DEMO_MODEL), directory=str(tmp_path / "server"), bind=bind)
    ours.send({"settings": msgspec.to_builtins(settings)})
    ours.close()
    with theirs:
        command = [sys.executable, "-m", "sidestream.runtime.server.batcher", str(theirs.fileno())]
        ended = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=GUARD)
    assert ended.returncode == code and "Traceback" not in ended.stderr, ended.stderr
