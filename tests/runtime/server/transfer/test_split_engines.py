"""`sidestream serve --prefill-engines 1 --decode-engines 1`: answers are those of one engine, also when engines die."""

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sidestream import SamplingParams
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.router.router import Router
from sidestream.runtime.protocol.messages import Chunk
from support.serving import GUARD
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama

SIZES = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 256, "max_loras": 2, "num_kv_pages": 24}
LENGTHS = (300, 64, 65, 200, 129, 320, 30, 257)
NUMBERS = itertools.count()
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)


Found = tuple[list[int], list[list[tuple[int, float]]]]
"""Tokens, and the log-probabilities at each position."""


class Split:
    """The running server, and a router of its engines in this process."""

    def __init__(self, process: "subprocess.Popen[str]", directory: str, log: Path) -> None:
        self.process, self.log = process, log
        self.addresses = [f"ipc://{directory}/e-{index}.sock" for index in range(2)]

    def await_text(self, text: str, times: int = 1) -> str:
        """Wait until the log has this text so many times; return the last line with it."""
        end = time.monotonic() + 3 * GUARD
        while len(lines := [line for line in self.log.read_text().splitlines() if text in line]) < times:
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return lines[-1]

    def router(self) -> Router:
        return Router(self.addresses, poll_seconds=0.05, prefill_engines=1, prefill_min_tokens=100)

    def gpu_process(self, engine: int) -> int:
        """Process id of the GPU process of an engine."""
        (supervisor,) = (pid for pid in self._children(self.process.pid, "replica_process")[engine : engine + 1])
        (pid,) = self._children(supervisor, "gpu_process")
        return pid

    @staticmethod
    def _children(parent: int, module: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[1]) == parent and module in (entry / "cmdline").read_text() and fields[0] != "Z":
                        found.append(int(entry.name))
                except OSError:
                    continue
        return sorted(found)  # in the order of their start


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    base = tiny_llama(tmp_path_factory.mktemp("split"), tokenizer=True)
    specs = [AdapterSpec(rank=4), AdapterSpec(rank=8), AdapterSpec(rank=2)]
    return base.path, dict(zip(("first", "second", "third"), tiny_adapters(base, specs), strict=True))


@pytest.fixture(scope="module")
def server(model: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    path, adapters = model
    with tempfile.TemporaryDirectory(prefix="sst-") as directory:
        os.chmod(directory, 0o700)
        command = [sys.executable, "-m", "sidestream.tools.cli", "serve", str(path), "--device", "cpu"]
        command += ["--precision", "fp32", "--prefill-engines", "1", "--decode-engines", "1", "--port", "0"]
        command += ["--bind", f"ipc://{directory}/e.sock", "--kv-host-gb", "0.05", "--max-logprobs", "5"]
        command += ["--prefill-min-tokens", "100", "--lora-modules", *(f"{name}={adapters[name]}" for name in adapters)]
        for name, value in SIZES.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": directory}
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)
        try:
            yield Split(process, directory, log)
        finally:
            if process.poll() is None:
                process.terminate()
                assert process.wait(GUARD) == 0, log.read_text()


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], str | None]]:
    """Prompts of all lengths, some with a common beginning, for the base and three adapters."""
    source = random.Random(5)
    beginning = [source.randrange(200) for _ in range(128)]
    prompts = [[source.randrange(200) for _ in range(length)] for length in LENGTHS]
    prompts += [beginning + prompt[: 1 + 30 * index] for index, prompt in enumerate(prompts[:4])]
    return [(prompt, (None, "first", "second", "third")[index % 4]) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def answers(server: Split, requests: list[tuple[list[int], str | None]]) -> tuple[list[Found], dict[str, Any]]:
    """Answers of the two engines, the first ones that they compute, and their counters."""
    for name in ("prefill engine 0", "decode engine 1"):
        server.await_text(f"{name}: serving at")

    async def run() -> tuple[list[Found], dict[str, Any]]:
        router = server.router()
        await ready(router, "prefill-0", "decode-0")
        try:
            calls = [ask(router, *each, stream=index % 3 > 0) for index, each in enumerate(requests)]
            return await asyncio.gather(*calls), await router.stats()
        finally:
            await router.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(server: Split, requests: list[tuple[list[int], str | None]], answers: Any) -> list[Found]:
    """Answers of the decode engine alone, which computes each prompt again."""

    async def run() -> list[Found]:
        router = Router(server.addresses[1:], poll_seconds=0.05)
        await ready(router, "engine-0")
        try:
            params = replace(PARAMS, skip_reading_prefix_cache=True)
            return [await ask(router, *each, params=params) for each in requests]
        finally:
            await router.close()

    return asyncio.run(run())


async def ask(router: Router, prompt: list[int], adapter: str | None, stream: bool = True, **more: Any) -> Found:
    chunks: list[Chunk] = []
    params = more.pop("params", PARAMS)
    request = EngineRequest(f"r{next(NUMBERS)}", prompt, params, adapter, stream=stream, **more)
    async for each in router.stream(request):
        chunks += each
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    scores = [
        sorted((each.token_id, each.logprob) for each in entry) for chunk in chunks for entry in chunk.logprobs or ()
    ]
    assert chunks[-1].usage is not None and chunks[-1].usage.output_tokens == len(tokens)
    assert chunks[-1].usage.prompt_tokens == len(prompt)
    return tokens, scores


def same(found: Found, expected: Found) -> bool:
    return found[0] == expected[0] and all(
        [token for token, _ in one] == [token for token, _ in other]
        and [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-5)
        for one, other in zip(found[1], expected[1], strict=True)
    )


async def ready(router: Router, *names: str) -> None:
    """Start, and wait until these engines accept requests."""
    if not router._started:
        await router.start()
    async with asyncio.timeout(3 * GUARD):
        while {(await router.health()).engines.get(name) for name in names} != {"ok"}:
            await asyncio.sleep(0.05)


def test_answers_are_those_of_one_engine(
    requests: list[tuple[list[int], str | None]], answers: tuple[list[Found], dict[str, Any]], expected: list[Found]
) -> None:
    found, stats = answers
    assert all(map(same, found, expected))
    prefill, decode = stats["prefill-0"], stats["decode-0"]
    assert prefill["prefills_total"] >= 6 and not prefill.get("prefills_failed_total")
    assert decode["host_pages_loaded_total"] >= 12 and not decode["page_loads_refused_total"]
    long = sum(len(prompt) >= 100 for prompt, _ in requests)
    assert prefill["requests_total"] <= long, "short prompts are computed by the decode engine"


def test_http_names_both_kinds(server: Split, expected: list[Found]) -> None:
    url = server.await_text("answering HTTP at").split()[-1]

    def post(body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body | {"max_tokens": 4, "temperature": 0, "ignore_eos": True}).encode()
        query = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(query, timeout=GUARD) as answer:
            return json.load(answer)

    with urllib.request.urlopen(f"{url}/health", timeout=GUARD) as answer:
        assert json.load(answer)["engines"] == {"prefill-0": "ok", "decode-0": "ok"}
    usage = post({"prompt": list(range(150))})["usage"]
    assert usage["prompt_tokens"] == 150
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "both engines have computed them for this request"
    choices = post({"prompt": "a text " * 64, "n": 2, "model": "second"})["choices"]
    assert choices[0]["text"] == choices[1]["text"] != ""
    with urllib.request.urlopen(f"{url}/metrics", timeout=GUARD) as answer:
        lines = answer.read().decode().splitlines()
    assert 'sidestream_engine_prefills_total{engine="prefill-0"} 2.0' in lines
    assert 'sidestream_engine_page_leases{engine="prefill-0"} 0.0' in lines, "they are released after the copy"


def test_no_request_is_lost_when_engines_die(
    server: Split, requests: list[tuple[list[int], str | None]], expected: list[Found]
) -> None:
    """The GPU processes of both engines are killed, one after the other, while requests are at all stages."""

    async def run() -> list[Found]:
        router = server.router()
        await ready(router, "prefill-0", "decode-0")
        try:
            calls = [asyncio.create_task(ask(router, *each)) for each in requests * 2]
            for engine, ended in ((0, 2), (1, 8)):
                while sum(call.done() for call in calls) < ended:
                    await asyncio.sleep(0.01)
                os.kill(server.gpu_process(engine), signal.SIGKILL)
            found = await asyncio.gather(*calls)
            await ready(router, "prefill-0", "decode-0")
            async with asyncio.timeout(GUARD):  # the router may wait before it uses the new prefill engine
                for number in itertools.count(1):
                    prompt = [number, *range(200)]
                    again = replace(PARAMS, skip_reading_prefix_cache=True)
                    assert same(await ask(router, prompt, "second"), await ask(router, prompt, "second", params=again))
                    if (await router.stats())["decode-0"]["host_pages_loaded_total"] >= 3:
                        return found
            raise AssertionError("the new decode engine has read no page of the new prefill engine")
        finally:
            await router.close()

    assert all(map(same, asyncio.run(run()), expected * 2))
