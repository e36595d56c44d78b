"""Three engine processes behind the router, with a model that is a hash and checks every plan."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter

import pytest
from sidestream.runtime.api.errors import DeadlineError, EngineDeadError, RequestError, ServerError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.router.router import Router
from support.fake_runner import continuation
from support.serving import serve_fake

VOCABULARY = 251
ADAPTERS = 50
VICTIMS = (("server.batcher",), ("fake_gpu",), ("server.batcher", "fake_gpu"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    more = tmp_path_factory.mktemp("more")
    with contextlib.ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(f"engine{index}") for index in range(3)]
        sizes = {"adapters": ADAPTERS, "num_slots": 20, "num_pages": 128, "max_num_seqs": 32}
        servers = [
            stack.enter_context(serve_fake(folder, step_seconds=0.004, adapter_roots=[str(more)], **sizes))
            for folder in folders
        ]
        for server in servers:
            server.more = more
        yield servers


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def router(servers, loop):
    router = Router([server.address for server in servers], poll_seconds=0.1)
    loop.run(router.start())
    loop.run(all_ok(router))
    yield router
    loop.run(router.close())


async def all_ok(router, count=3, seconds=60.0):
    async with asyncio.timeout(seconds):
        while list((await router.health()).engines.values()).count("ok") != count:
            await asyncio.sleep(0.02)


def kill(server, victims) -> None:
    for victim in victims:
        with contextlib.suppress(LookupError):
            os.kill(server.child(victim), signal.SIGKILL)


async def answer(router, name, prompt, count=60, adapter=None, begun=None, **fields):
    """The tokens and text of each completion, and the usage; `begun` is an event that is set when an engine has taken
    the request.
    """
    stream = fields.pop("stream", True)
    deadline = fields.pop("deadline_seconds", None)
    params = SamplingParams(**({"temperature": 0, "max_tokens": count, "ignore_eos": True} | fields))
    tokens = {index: [] for index in range(params.n)}
    texts = dict.fromkeys(tokens, "")
    taken, versions = [], set()

    def accepted(prompt_tokens, adapter_content):
        taken.append(prompt_tokens)
        if begun is not None:
            begun.set()
        versions.add(adapter_content)

    def keep(chunk):
        assert chunk.first == len(tokens[chunk.index]), "no token is lost or told twice"
        tokens[chunk.index] += chunk.token_ids
        texts[chunk.index] += chunk.text
        return True

    request = EngineRequest(
        name,
        prompt,
        params,
        adapter,
        stream=stream,
        deadline_seconds=deadline,
        when_accepted=accepted,
        direct=(lambda chunk: chunk.first % 7 != 3 and keep(chunk)) if stream else None,  # some go by the task
    )
    async for chunks in router.stream(request):
        assert chunks
        for chunk in chunks:
            keep(chunk)
    assert set(taken) == {chunks[-1].usage.prompt_tokens}, "each engine that took it told the same prompt"
    assert versions and (adapter is not None) == ("" not in versions)
    return tokens, texts, chunks[-1].usage


def number_of(adapter):
    return -1 if adapter is None else int(adapter[1:])


async def check(router, name, prompt, count=60, adapter=None, **fields):
    tokens, texts, usage = await answer(router, name, prompt, count, adapter, **fields)
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    expected = continuation(ids, number_of(adapter), count, VOCABULARY)
    for index in tokens:
        assert tokens[index] == expected and texts[index] == bytes(expected).decode(errors="replace")
    assert usage.output_tokens == count * len(tokens) and usage.prompt_tokens == len(ids)
    assert 0 < usage.first_token_seconds <= usage.total_seconds
    return usage


def test_three_engines_are_one(router, loop):
    async def look():
        model, health = await router.model(), await router.health()
        cards, stats = await router.adapters(), await router.stats()
        assert (model.name, model.vocabulary, model.max_adapters) == ("fake", VOCABULARY, 20)
        assert health.status == "ok" and health.engines == {f"engine-{index}": "ok" for index in range(3)}
        assert [card.name for card in cards] == sorted(f"a{index}" for index in range(ADAPTERS))
        assert set(cards[0].places) == set(stats) == set(health.engines)
        assert all(told["requests_open"] == 0 for told in stats.values())

    loop.run(look())


def test_answers_are_right_whole_and_streamed_text_and_ids(router, loop):
    async def ask():
        await asyncio.gather(
            check(router, "ids", [1, 2, 3], adapter="a1"),
            check(router, "text", "héllo"),
            check(router, "whole", [4, 5], stream=False),
            check(router, "several", [6, 7], n=3, adapter="a2"),
        )
        with pytest.raises(RequestError, match="out of vocabulary: the model has 251"):
            await answer(router, "bad", [9999])
        with pytest.raises(ServerError) as refused:
            await answer(router, "unknown", [1], adapter="nobody")
        assert refused.value.code == "unknown_adapter"
        with pytest.raises(DeadlineError):
            await answer(router, "late", [1], count=400, deadline_seconds=0.1)

    loop.run(ask())


async def of_engines(router, *names):
    return {engine: {name: told.get(name, 0) for name in names} for engine, told in (await router.stats()).items()}


def test_adapters_are_found_where_they_are(router, loop):
    """50 adapters, three engines with 20 slots each, 24 requests at a time."""

    async def ask():
        source = random.Random(5)
        names = [f"a{source.randrange(ADAPTERS)}" for _ in range(600)]
        todo = iter(enumerate(names))

        async def worker():
            for index, adapter in todo:
                await check(router, f"l{index}", [index % 250, 3], 4, adapter)

        async def counts():
            told = await of_engines(router, "adapter_hits_total", "adapter_misses_total")
            return sum((Counter(each) for each in told.values()), Counter())

        await asyncio.gather(*(check(router, f"w{index}", [3], 2, f"a{index}") for index in range(ADAPTERS)))
        before = await counts()
        await asyncio.gather(*(worker() for _ in range(24)))
        return (await counts()) - before

    found = loop.run(ask())
    assert sum(found.values()) == 600
    assert found["adapter_hits_total"] >= 0.9 * 600, found


def test_a_hot_adapter_is_served_by_all(router, loop):
    async def ask():
        before = await of_engines(router, "requests_total")
        await asyncio.gather(*(check(router, f"h{index}", [index], 30, "a7") for index in range(60)))
        after = await of_engines(router, "requests_total", "routed_spread_hot_total")
        assert all(after[name]["requests_total"] - before[name]["requests_total"] >= 8 for name in after)
        assert sum(told["routed_spread_hot_total"] for told in after.values()) >= 2

    loop.run(ask())


def test_a_long_beginning_stays_where_it_was_seen(router, loop):
    async def ask():
        prompt = [number % 250 for number in range(300)]
        await check(router, "p0", prompt, 4)
        again = [await check(router, f"p{index}", prompt, 4) for index in range(1, 5)]
        assert all(usage.cached_tokens == 256 for usage in again)

    loop.run(ask())


def test_adapters_are_loaded_everywhere_and_come_back_with_an_engine(router, servers, loop):
    async def ask():
        path = servers[0].more / "newcomer"
        path.mkdir()
        with pytest.raises(ServerError) as refused:
            await router.load_adapter("newcomer", "/etc", False)
        assert refused.value.code == "forbidden"
        await router.load_adapter("newcomer", str(path), False)
        with pytest.raises(ServerError) as refused:
            await router.load_adapter("newcomer", str(path), False)
        assert refused.value.code == "adapter_in_use"
        (card,) = [card for card in await router.adapters() if card.name == "newcomer"]
        assert len(card.places) == 3
        held = servers[1].log.parent / "a0" / "held"
        held.touch()  # the next start waits for it, so that it is seen
        kill(servers[1], VICTIMS[0])
        async with asyncio.timeout(60):
            while (await router.health()).engines["engine-1"] == "ok":
                await asyncio.sleep(0.01)
        held.unlink()
        await all_ok(router)
        assert "newcomer" in {info.name for info in await router._links["engine-1"].client.list_adapters()}
        tokens, _, _ = await answer(router, "n", [1, 2], 8, "newcomer")
        assert tokens[0] == continuation([1, 2], ADAPTERS, 8, VOCABULARY)
        begun = asyncio.Event()
        long = asyncio.create_task(answer(router, "n2", [1, 2], 300, "newcomer", begun))
        await begun.wait()
        await router.unload_adapter("newcomer")
        with pytest.raises(ServerError) as refused:
            await answer(router, "n3", [1], 4, "newcomer")
        assert refused.value.code == "unknown_adapter"
        assert "newcomer" not in {card.name for card in await router.adapters()}
        assert (await long)[0][0] == continuation([1, 2], ADAPTERS, 300, VOCABULARY), "what is under way is finished"
        async with asyncio.timeout(60):
            for link in router._links.values():
                while "newcomer" in {info.name for info in await link.client.list_adapters()}:
                    await asyncio.sleep(0.05)
        with pytest.raises(ServerError):
            await router.unload_adapter("newcomer")

    loop.run(ask())


def test_two_versions_of_an_adapter_never_make_one_answer(router, servers, loop):
    """It is replaced everywhere while its former version answers, and that version's engine dies."""

    async def ask():
        for name in ("old", "new"):
            (servers[0].more / name).mkdir()
        await router.load_adapter("version", str(servers[0].more / "old"), False)
        numbers = range(ADAPTERS, ADAPTERS + 5)
        old = await answer(router, "v0", [1, 2], 8, "version")
        former = next(n for n in numbers if continuation([1, 2], n, 8, VOCABULARY) == old[0][0])
        before = await of_engines(router, "requests_total")
        received = []

        async def stream():
            request = EngineRequest(
                "v1", [1, 2], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), "version"
            )
            async for chunks in router.stream(request):
                received.extend(token for chunk in chunks for token in chunk.token_ids)

        with contextlib.ExitStack() as stack:
            for server in servers:
                stack.enter_context(server.held(beyond=40))
            long = asyncio.create_task(stream())
            whole = asyncio.create_task(answer(router, "v2", [1, 2], 400, "version", stream=False))
            while not received:
                await asyncio.sleep(0.01)
            await router.load_adapter("version", str(servers[0].more / "new"), True)
            after = await of_engines(router, "requests_total")
            for index, server in enumerate(servers):
                if after[f"engine-{index}"] != before[f"engine-{index}"]:
                    kill(server, VICTIMS[1])
        with pytest.raises(ServerError) as changed:
            await long
        assert changed.value.code == "adapter_changed"
        assert received == continuation([1, 2], former, 400, VOCABULARY)[: len(received)] and len(received) < 400
        (tokens, _, _) = await whole
        assert tokens[0] in [continuation([1, 2], number, 400, VOCABULARY) for number in numbers]
        await all_ok(router)
        await router.unload_adapter("version")

    loop.run(ask())


def test_engines_die_under_load_and_no_request_fails(router, servers, loop, pytestconfig):
    """kill -9 of GPU processes, batchers, or both, while 32 streams run; sometimes all engines are down at once."""
    kills = 20 if pytestconfig.getoption("--exhaustive") else 4
    source = random.Random(11)

    async def attack():
        for number in range(kills):
            # one that dies again and again before it answers is no engine that comes back
            while not router._balancer.load(f"engine-{number % 3}"):
                await asyncio.sleep(0.01)
            await asyncio.sleep(source.uniform(0.2, 1.2))
            kill(servers[number % 3], VICTIMS[number % len(VICTIMS)] if number < 3 else source.choice(VICTIMS))
        over.set()

    async def worker(place):
        number = 0
        while not over.is_set():
            number += 1
            adapter = source.choice([None, "a1", "a2", "a3"])
            prompt = [source.randrange(120) for _ in range(source.choice([2, 30, 150]))]
            fields = source.choice([{}, {}, {"n": 2}, {"stream": False}, {"min_tokens": 100}])
            await check(router, f"k{place}-{number}", prompt, 100, adapter, **fields)
            done.append(1)

    async def run():
        await asyncio.gather(attack(), *(worker(place) for place in range(32)))
        await all_ok(router)
        before = after = await of_engines(router, "requests_total")
        async with asyncio.timeout(60):  # an engine that comes back is used again, when its backoff ends
            while any(after[name] == before[name] for name in before):
                await asyncio.gather(*(check(router, f"b{index}", [index], 8) for index in range(24)))
                after = await of_engines(router, "requests_total")

    over, done = asyncio.Event(), []
    loop.run(run())
    assert len(done) >= 32


def test_an_engine_that_stops_gets_nothing_new_and_loses_nothing(tmp_path):
    async def ask(servers):
        router = Router([server.address for server in servers], poll_seconds=0.1)
        await router.start()
        await all_ok(router, 2)
        begun = [asyncio.Event() for _ in range(24)]
        with servers[0].held(beyond=280), servers[1].held(beyond=280):
            under_way = [
                asyncio.create_task(check(router, f"d{index}", [index, 1], 300, begun=event, stream=index % 4 > 0))
                for index, event in enumerate(begun)
            ]
            async with asyncio.timeout(60):
                await asyncio.gather(*(event.wait() for event in begun))
                servers[1].process.send_signal(signal.SIGTERM)
                while (await router.health()).engines["engine-1"] == "ok":
                    await asyncio.sleep(0.01)
        await asyncio.gather(*(check(router, f"e{index}", [index], 8) for index in range(12)))
        await asyncio.gather(*under_way)
        assert (await router.health()).status == "ok"
        await router.close()

    with contextlib.ExitStack() as stack:
        for name in "ab":
            (tmp_path / name).mkdir()
        sizes = {"num_pages": 128, "max_num_seqs": 32, "step_seconds": 0.004}
        asyncio.run(ask([stack.enter_context(serve_fake(tmp_path / name, **sizes)) for name in "ab"]))


def test_an_engine_that_comes_back_in_a_pause_is_paused(tmp_path):
    async def ask(servers):
        router = Router([server.address for server in servers], poll_seconds=0.05)
        await router.start()
        await all_ok(router, 2)

        async def paused():
            return [values["paused"] for values in (await router.stats()).values()]

        await router.pause("keep")
        kill(servers[1], VICTIMS[0])
        async with asyncio.timeout(60):
            while (await router.health()).engines["engine-1"] == "ok":
                await asyncio.sleep(0.01)
        await all_ok(router, 2)
        assert await paused() == [1, 1]
        waiting = [asyncio.create_task(check(router, f"p{index}", [index], 8)) for index in range(8)]
        assert not (await asyncio.wait(waiting, timeout=0.3))[0]
        await router.resume()
        await asyncio.gather(*waiting)
        kill(servers[0], VICTIMS[0])
        async with asyncio.timeout(60):
            while (await router.health()).engines["engine-0"] == "ok":
                await asyncio.sleep(0.01)
        await all_ok(router, 2)
        assert await paused() == [0, 0]
        await router.close()

    with contextlib.ExitStack() as stack:
        for name in "ab":
            (tmp_path / name).mkdir()
        asyncio.run(ask([stack.enter_context(serve_fake(tmp_path / name)) for name in "ab"]))


def test_without_any_engine_requests_fail_when_patience_ends(loop, tmp_path):
    async def ask():
        lonely = Router([f"ipc://{tmp_path}/nobody.sock"], patience_seconds=0.5, poll_seconds=0.05)
        await lonely.start()
        with pytest.raises(EngineDeadError, match="no engine is running"):
            await answer(lonely, "x", [1])
        with pytest.raises(EngineDeadError):
            await lonely.model()
        assert (await lonely.health()).status == "dead" and await lonely.stats() == {}
        with pytest.raises(EngineDeadError):
            await lonely.load_adapter("a", "/a", False)
        await lonely.close()

    loop.run(ask())
    with pytest.raises(ValueError, match="at least one engine"):
        Router([])
