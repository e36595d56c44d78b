"""Weighted sums of adapters over two engines: affinity, parts that are replaced under traffic, named sums."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sidestream.runtime.api.adapter_sum import sum_content
from sidestream.runtime.api.errors import ServerError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.router.router import Router
from support.serving import Server, serve_fake

SUM = "a0*0.7+a1*0.3"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    more = tmp_path / "more"
    for name in ("new", "other"):
        (more / name).mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            sizes = {"adapters": 3, "num_slots": 4, "adapter_roots": [str(more)], "step_seconds": 0.002}
            servers.append(stack.enter_context(serve_fake(tmp_path / name, **sizes)))
        yield servers


async def ready(router: Router) -> None:
    async with asyncio.timeout(60):
        while list((await router.health()).engines.values()).count("ok") != 2:
            await asyncio.sleep(0.02)


async def ask(router: Router, name: str, adapter: str, count: int = 4) -> str:
    """Return the content of the adapter that answered."""
    contents: list[str] = []
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    request = EngineRequest(name, [7, 8], params, adapter, when_accepted=lambda _, content: contents.append(content))
    received = 0
    async for chunks in router.stream(request):
        received += sum(len(chunk.token_ids) for chunk in chunks)
    assert received == count
    return contents[-1]


async def content_of(router: Router, *weights: tuple[str, float]) -> str:
    cards = [(await router.adapter(name), weight) for name, weight in weights]
    return sum_content((card.content, weight) for card, weight in cards if card is not None)


def run(servers: list[Server], scene: Any) -> None:
    async def whole() -> None:
        router = Router([server.address for server in servers], poll_seconds=0.1)
        await router.start()
        try:
            await ready(router)
            await scene(router)
        finally:
            await router.close()

    asyncio.run(asyncio.wait_for(whole(), 240))


def test_a_sum_stays_on_one_engine(servers: list[Server]) -> None:
    async def scene(router: Router) -> None:
        for index in range(8):
            await ask(router, f"r{index}", SUM)
            await asyncio.sleep(0.15)  # polls, which do not report sums
        counts = [dict(each) for each in router.counts.values()]
        assert sorted(sum(each.values()) for each in counts) == [0, 8]
        assert max(each.get("routed_adapter_on_gpu_total", 0) for each in counts) == 7

    run(servers, scene)


def test_a_part_is_replaced_and_unloaded_under_traffic(servers: list[Server], tmp_path: Path) -> None:
    async def scene(router: Router) -> None:
        stop, seen = asyncio.Event(), []

        async def traffic(who: int) -> None:
            index = 0
            while not stop.is_set():
                index += 1
                seen.append(await ask(router, f"t{who}-{index}", SUM, 20))

        before = await content_of(router, ("a0", 0.7), ("a1", 0.3))
        tasks = [asyncio.create_task(traffic(who)) for who in range(4)]
        while not seen:
            await asyncio.sleep(0.01)
        await router.load_adapter("a1", str(tmp_path / "more" / "new"), True)
        after = await content_of(router, ("a0", 0.7), ("a1", 0.3))
        assert after != before
        assert await ask(router, "next", SUM) == after
        stop.set()
        await asyncio.gather(*tasks)
        assert set(seen) <= {before, after}
        await router.unload_adapter("a1")
        with pytest.raises(ServerError, match="not known") as problem:
            await ask(router, "gone", SUM)
        assert problem.value.code == "unknown_adapter"

    run(servers, scene)


def test_a_named_sum_is_on_all_engines_and_comes_back(servers: list[Server], tmp_path: Path) -> None:
    async def scene(router: Router) -> None:
        await router.load_adapter("a1", str(tmp_path / "more" / "new"), True)
        await router.load_adapter("mix", f"sum:{SUM}", False)
        card = await router.adapter("mix")
        assert card is not None and card.is_sum and set(card.places) == {"engine-0", "engine-1"}
        expected = await content_of(router, ("a0", 0.7), ("a1", 0.3))
        assert card.content == await ask(router, "named", "mix") == await ask(router, "weights", SUM) == expected
        for index, server in enumerate(servers):
            held = server.log.parent / "a0" / "held"
            held.touch()  # the next GPU process does not start before it is gone
            os.kill(server.child("fake_gpu"), signal.SIGKILL)
            async with asyncio.timeout(60):
                while (await router.health()).engines[f"engine-{index}"] == "ok":
                    await asyncio.sleep(0.01)
            assert await ask(router, f"during-{index}", "mix") == expected
            held.unlink()
            await ready(router)
        await router.load_adapter("a1", str(tmp_path / "more" / "other"), True)
        assert await ask(router, "follows", "mix") == await content_of(router, ("a0", 0.7), ("a1", 0.3)) != expected
        await router.unload_adapter("a1")
        with pytest.raises(ServerError, match="an adapter of 'mix' is not known; load it again") as problem:
            await ask(router, "lacks-one", "mix")
        assert problem.value.code == "unknown_adapter"
        await router.unload_adapter("mix")
        assert await router.adapter("mix") is None

    run(servers, scene)
