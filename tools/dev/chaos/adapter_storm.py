"""`python -m sidestream.tools.dev.chaos.adapter_storm`: replace adapters all the time behind two gateways.

Two servers of the demo model with few adapter slots, and two routers that do not know of each other. Names are
replaced, unloaded and loaded through either router, engines are killed, and clients ask. Each answer must be that of
the version that its engine reported, and this version must be the acknowledged one or one of an overlapping change.
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

from ....runtime.api.errors import RequestError, ServerError
from ....runtime.api.sampling_params import SamplingParams
from ....runtime.demo_model import DEMO_MODEL
from ....runtime.gateway.interfaces import EngineRequest
from ....runtime.gateway.router.router import Router
from ...bench.random_model import write_random_adapter
from .adapter_changes import Change, possible
from .served import ServedDemo

ENGINES, GATEWAYS, NAMES, VERSIONS = 2, 2, 6, 8
PROMPT = "What is the capital of France?"
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
VICTIMS = (("batcher",), ("GPU process",), ("batcher", "GPU process"))
UP_SECONDS = 300.0
ARGUMENTS = ["--precision", "int8", "--max-loras", "3", "--max-cpu-loras", "4", "--max-lora-rank", "32"]
ARGUMENTS += ["--lora-target-modules", "all", "--max-model-len", "256", "--num-kv-pages", "64", "--max-num-seqs", "8"]
ARGUMENTS += ["--device", "cpu", "--speculation", "off"]


@dataclass
class Seen:
    """Outcomes of requests, changes and kills."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Storm:
    """Runs writers, askers and a killer until `until`, by the monotonic clock."""

    def __init__(self, routers: list[Router], engines: list[ServedDemo], folders: list[Path], seed: int) -> None:
        self.routers, self.engines, self.folders = routers, engines, folders
        self.source = random.Random(seed)
        self.changes: dict[str, list[Change]] = {f"q{number}": [] for number in range(NAMES)}
        self.texts: dict[str, str] = {}
        self.contents: dict[str, str] = {}
        self.seen = Seen()
        self.until = 0.0

    async def ask(self, router: Router, name: str) -> tuple[str, str]:
        """Return the content hash that the engine reported last, and the answer."""
        contents = [""]
        request = EngineRequest(
            f"r{self.source.getrandbits(60)}", PROMPT, PARAMS, name, when_accepted=lambda _, each: contents.append(each)
        )
        text = "".join([chunk.text async for chunks in router.stream(request) for chunk in chunks])
        return contents[-1], text

    async def measure(self) -> None:
        """Load each version under a name of its own, and record its answer."""
        for folder in self.folders:
            await self.routers[0].load_adapter(folder.name, str(folder), True)
            content, text = await self.ask(self.routers[0], folder.name)
            self.contents[folder.name], self.texts[content] = content, text
        print(f"{len(self.texts)} versions, {len(set(self.texts.values()))} different answers", flush=True)

    async def change(self) -> None:
        while time.monotonic() < self.until:
            name, folder = self.source.choice(list(self.changes)), self.source.choice(self.folders)
            router, unload = self.source.choice(self.routers), self.source.random() < 0.15
            change = Change(None if unload else self.contents[folder.name], time.monotonic())
            self.changes[name].append(change)
            kind = "unload" if unload else "load"
            try:
                if unload:
                    await router.unload_adapter(name)
                else:
                    await router.load_adapter(name, str(folder), True)
            except (RequestError, ServerError, TimeoutError) as problem:
                change.ended = time.monotonic()
                self.seen.counts[f"{kind}: {getattr(problem, 'code', 'timeout')}"] += 1
                await asyncio.sleep(0.2)
            else:
                change.ended = change.acknowledged = time.monotonic()
                self.seen.counts[f"{kind}: acknowledged"] += 1
            await asyncio.sleep(self.source.choice((0.0, 0.0, 0.3)))

    async def request(self) -> None:
        while time.monotonic() < self.until:
            name, started = self.source.choice(list(self.changes)), time.monotonic()
            try:
                content, text = await self.ask(self.source.choice(self.routers), name)
            except (RequestError, ServerError, TimeoutError) as problem:
                self.seen.counts[f"request: {getattr(problem, 'code', 'timeout')}"] += 1
                if None not in possible(self.changes[name], started, time.monotonic()) and isinstance(
                    problem, (RequestError, ServerError)
                ):
                    self.seen.counts["request: refused although a version was acknowledged"] += 1
                await asyncio.sleep(0.05)
                continue
            self.judge(name, started, content, text)

    def judge(self, name: str, started: float, content: str, text: str) -> None:
        allowed = possible(self.changes[name], started, time.monotonic())
        self.seen.counts["request: answered"] += 1
        if text != self.texts.get(content):
            self.seen.wrong.append(f"{name}: not the answer of version {content[:8]}: {text!r}")
        elif content not in allowed:
            self.seen.wrong.append(f"{name}: version {content[:8]}, allowed {[str(each)[:8] for each in allowed]}")
        elif len(allowed) > 1:
            self.seen.counts["request: during a change"] += 1

    async def kill(self, every: float) -> None:
        while every and time.monotonic() + every < self.until:
            await asyncio.sleep(every)
            statuses = (await self.routers[0].health()).engines
            if list(statuses.values()).count("ok") < ENGINES:
                continue
            processes = await asyncio.to_thread(self.source.choice(self.engines).processes)
            for role in self.source.choice(VICTIMS):
                with contextlib.suppress(ProcessLookupError, KeyError):
                    os.kill(processes[role], signal.SIGKILL)
                    self.seen.counts[f"kill: {role}"] += 1

    async def run(self, seconds: float, kill_every: float, askers: int) -> None:
        """Run the storm, then wait until all engines serve the same adapters."""
        await self.measure()
        self.until = time.monotonic() + seconds
        writers = [self.change() for _ in range(3)]
        await asyncio.gather(*writers, *(self.request() for _ in range(askers)), self.kill(kill_every))
        await until_up(self.routers)
        end = time.monotonic() + UP_SECONDS
        while (differing := await self._differing()) and time.monotonic() < end:
            await asyncio.sleep(0.5)
        self.seen.wrong += differing

    async def _differing(self) -> list[str]:
        """Return the names whose versions differ between engines, or from what the changes allow at the end."""
        links: list[Any] = list(self.routers[0]._links.values())
        held = [{info.name: info.content for info in await link.client.list_adapters()} for link in links]
        found = []
        for name, changes in self.changes.items():
            versions = {each.get(name) for each in held}
            if len(versions) > 1 or not versions <= possible(changes, time.monotonic(), time.monotonic()):
                found.append(f"{name}: engines ended with {versions}")
        return found


async def until_up(routers: list[Router]) -> None:
    """Wait until all routers use all engines. Raises TimeoutError."""
    async with asyncio.timeout(UP_SECONDS):
        for router in routers:
            while list((await router.health()).engines.values()).count("ok") < ENGINES:
                await asyncio.sleep(0.1)


async def storm(engines: list[ServedDemo], folders: list[Path], options: argparse.Namespace) -> Seen:
    """Run the storm with new routers."""
    routers = [Router([engine.address for engine in engines], patience_seconds=UP_SECONDS) for _ in range(GATEWAYS)]
    try:
        for router in routers:
            await router.start()
        await until_up(routers)
        made = Storm(routers, engines, folders, options.seed)
        await made.run(options.minutes * 60, options.kill_every, options.askers)
        return made.seen
    finally:
        for router in routers:
            await router.close()


def _strengthen(config: Path) -> None:
    """Scale an adapter so that its answers differ from the base model's."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(fields | {"lora_alpha": 64}), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if an answer or the adapters at the end were wrong."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.dev.chaos.adapter_storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N", help="length of the storm (default: 5)")
    parser.add_argument("--kill-every", type=float, default=30.0, metavar="S", help="0: never (default: 30 s)")
    parser.add_argument("--askers", type=int, default=6, metavar="N", help="requests at a time (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="of names, versions and victims (default: 0)")
    options = parser.parse_args(arguments)
    config = json.loads((Path(DEMO_MODEL) / "config.json").read_text(encoding="utf-8"))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sss-")))
        folders = [folder / "adapters" / f"v{number}" for number in range(VERSIONS)]
        for number, each in enumerate(folders):
            write_random_adapter(each, config, 4, 1000 + number)
            _strengthen(each / "adapter_config.json")
        roots = ["--adapter-root", str(folder / "adapters"), "--no-save-adapters"]
        engines = [
            stack.enter_context(ServedDemo(folder / f"e{number}", *roots, *ARGUMENTS)) for number in range(ENGINES)
        ]
        for engine in engines:
            engine.wait(UP_SECONDS)
        seen = asyncio.run(storm(engines, folders, options))
    print(f"{options.minutes:g} minutes, seed {options.seed}: {len(seen.wrong)} wrong")
    for kind, count in sorted(seen.counts.items()):
        print(f"{count:8} {kind}")
    for line in seen.wrong[:20]:
        print(line)
    return int(bool(seen.wrong))


if __name__ == "__main__":
    sys.exit(main())
