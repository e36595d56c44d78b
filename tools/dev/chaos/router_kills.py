"""`python -m sidestream.tools.dev.chaos.router_kills`: kill -9 of engines behind the router, while streams run.

Several servers of the demo model, one router, and clients that stream all the time. Each answer is compared with that
of one engine before the first kill: token for token, text, log-probabilities and usage.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....runtime.api.sampling_params import SamplingParams
from ....runtime.demo_model import DEMO_MODEL
from ....runtime.gateway.interfaces import EngineRequest
from ....runtime.gateway.router.router import Router
from .served import ServedDemo

VICTIMS = (("batcher",), ("GPU process",), ("batcher", "GPU process"))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 17},
    "penalties": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "log-probabilities": {"temperature": 0.0, "logprobs": 2},
    "two completions": {"temperature": 1.0, "seed": 3, "n": 2},
    "stop string": {"temperature": 0.0, "stop": ["e "], "min_tokens": 40},
}
TOKENS = 64
QUESTIONS = 24
UP_SECONDS = 180.0
ANSWERS_BETWEEN = 8


@dataclass(frozen=True)
class Question:
    """A question; `whole`: answered at once instead of as a stream."""

    prompt: str
    adapter: str | None
    kind: str
    whole: bool = False


@dataclass
class Answer:
    """Return all completions of one answer."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    ends: dict[int, Any] = field(default_factory=dict)
    counted: tuple[int, int] = (0, 0)


@dataclass
class Seen:
    """Outcomes. `pauses`: the longest seconds between two chunks of each answer."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


async def ask(router: Router, name: str, question: Question, seen: Seen | None = None) -> Answer:
    """Return one answer. Raises the router's errors."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **KINDS[question.kind])
    request = EngineRequest(name, question.prompt, params, question.adapter, stream=not question.whole)
    answer, last, longest = Answer(), time.monotonic(), 0.0
    async for chunks in router.stream(request):
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        for chunk in chunks:
            if chunk.first != len(answer.tokens.setdefault(chunk.index, [])):
                raise RuntimeError(f"{name}: a gap or a repetition at token {chunk.first}")
            answer.tokens[chunk.index] += chunk.token_ids
            answer.texts[chunk.index] = answer.texts.get(chunk.index, "") + chunk.text
            answer.logprobs += [(chunk.index, entry) for entry in chunk.logprobs or ()]
            if chunk.finish_reason is not None:
                answer.ends[chunk.index] = chunk.finish_reason, chunk.stop_reason
            if chunk.usage is not None:
                answer.counted = chunk.usage.prompt_tokens, chunk.usage.output_tokens
    if seen is not None:
        seen.pauses.append(longest)
    return answer


def questions(source: random.Random, count: int) -> list[Question]:
    """Return questions of all kinds and adapters."""
    known = json.loads((Path(DEMO_MODEL) / "prompts.json").read_text(encoding="utf-8"))
    kinds = list(KINDS)
    return [
        Question(entry["prompt"], entry["adapter"], kinds[place % len(kinds)], whole=place % 8 == 7)
        for place, entry in enumerate(source.choices(known, k=count))
    ]


def kill(served: ServedDemo, roles: tuple[str, ...]) -> None:
    """Send SIGKILL."""
    processes = served.processes()
    for role in roles:
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(processes[role], signal.SIGKILL)


async def attack(router: Router, engines: list[ServedDemo], kills: int, streams: int, source: random.Random) -> Seen:
    """Stream without end and kill at random moments; return when the streams of the last kill have ended."""
    asked = questions(source, QUESTIONS)
    answers = await asyncio.gather(*(ask(router, f"reference-{place}", each) for place, each in enumerate(asked)))
    expected = dict(zip(asked, answers, strict=True))
    seen, over = Seen(), asyncio.Event()
    print(f"{len(expected)} questions asked of undisturbed engines; {streams} streams begin", flush=True)

    async def stream(place: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            question = source.choice(asked)
            seen.kinds[question.kind] += 1
            try:
                answer = await ask(router, f"stream-{place}-{number}", question, seen)
            except Exception as problem:
                seen.failed.append(f"{question.kind}: {problem!r}")
                await asyncio.sleep(0.5)
                continue
            if answer == expected[question]:
                seen.right += 1
            else:
                seen.wrong.append(f"{question}: {answer} instead of {expected[question]}")

    async def killer() -> None:
        started, answered = time.monotonic(), 0
        for number in range(kills):
            await asyncio.sleep(source.uniform(0.0, 4.0))
            alive: list[str] = []
            # a server stops after five deaths in a row without an answer
            while len(alive) < min(2, len(engines)) or seen.right < answered + ANSWERS_BETWEEN:
                await asyncio.sleep(0.05)
                alive = [name for name, status in (await router.health()).engines.items() if status == "ok"]
            victim, roles = source.choice(alive), source.choice(VICTIMS)
            moved, answered = await moves(router), seen.right
            await asyncio.to_thread(kill, engines[int(victim.removeprefix("engine-"))], roles)
            await asyncio.sleep(0.3)
            print(
                f"{time.monotonic() - started:7.1f} s  kill {number + 1:3}: {' and '.join(roles):24} of {victim} "
                f"({len(alive)} of {len(engines)} engines were in use), "
                f"{await moves(router) - moved:3} streams moved",
                flush=True,
            )
        over.set()

    await asyncio.gather(killer(), *(stream(place) for place in range(streams)))
    return seen


async def moves(router: Router) -> int:
    """Return the number of streams that left a dead engine."""
    return sum(int(counts["streams_moved_away_total"]) for counts in router.counts.values())


async def until_up(router: Router, count: int) -> float:
    """Wait until all engines are in use; return the seconds. Raises TimeoutError."""
    started = time.monotonic()
    async with asyncio.timeout(UP_SECONDS):
        while list((await router.health()).engines.values()).count("ok") < count:
            await asyncio.sleep(0.1)
    return time.monotonic() - started


async def run(engines: list[ServedDemo], kills: int, streams: int, seed: int) -> Seen:
    """Run the attack, then check that every engine is used again. Raises RuntimeError if one is not."""
    router = Router([engine.address for engine in engines], patience_seconds=UP_SECONDS)
    await router.start()
    try:
        await until_up(router, len(engines))
        source = random.Random(seed)
        seen = await attack(router, engines, kills, streams, source)
        print(
            f"all engines in use again {await until_up(router, len(engines)):.1f} s after the last stream", flush=True
        )
        before = {name: counts.total() for name, counts in router.counts.items()}
        extra = questions(source, streams)
        await asyncio.gather(*(ask(router, f"after-{place}", each) for place, each in enumerate(extra)))
        idle = [name for name, counts in router.counts.items() if counts.total() == before[name]]
        if idle:
            raise RuntimeError(f"{', '.join(idle)} came back and got no request")
        return seen
    finally:
        await router.close()


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a request failed or an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.dev.chaos.router_kills", description=__doc__)
    parser.add_argument("--engines", type=int, default=3, metavar="N", help="servers (default: 3)")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="how many kills (default: 20)")
    parser.add_argument("--streams", type=int, default=32, metavar="N", help="streams at a time (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="of moments, victims and questions (default: 0)")
    options = parser.parse_args(arguments)
    print(f"{options.engines} engines, {options.kills} kills under {options.streams} streams, seed {options.seed}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssr-")))
        engines = [stack.enter_context(ServedDemo(folder / str(place))) for place in range(options.engines)]
        seen = asyncio.run(run(engines, options.kills, options.streams, options.seed))
    pauses = sorted(seen.pauses)
    print(f"answers: {seen.right} right, {len(seen.wrong)} wrong, {len(seen.failed)} failed")
    print("of them " + ", ".join(f"{count} {kind}" for kind, count in sorted(seen.kinds.items())))
    print(f"longest pause within an answer: p50 {pauses[len(pauses) // 2]:.2f} s, longest {pauses[-1]:.2f} s")
    for line in (seen.wrong + seen.failed)[:20]:
        print(line)
    return int(bool(seen.wrong or seen.failed))


if __name__ == "__main__":
    sys.exit(main())
