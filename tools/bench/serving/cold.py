"""Workload C of `sidestream bench serve`: cold starts of adapters, and their effect on other streams."""

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from ....runtime.api.sampling_params import SamplingParams
from ....runtime.client.async_client import AsyncClient
from .report import longest_gap, shown
from .traffic import random_ids

PROMPT_TOKENS = 128
SETTLE_SECONDS = 0.25
PLACES = ("gpu", "cpu", "disk")
NAMES = {"gpu": "resident", "cpu": "host memory", "disk": "disk"}


@dataclass
class Background:
    """Streams that decode all the time; `arrivals` has the times of each one's chunks."""

    client: AsyncClient
    vocabulary: int
    output_len: int
    arrivals: list[list[float]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self, count: int, seed: int) -> None:
        """Start `count` streams of the base model, and wait for a chunk of each."""
        self.tasks = [asyncio.create_task(self._go_on(seed + index)) for index in range(count)]
        while sum(bool(times) for times in self.arrivals) < count:
            await self.check()
            await asyncio.sleep(0.01)

    async def check(self) -> None:
        """Raise the error that ended a stream."""
        for task in self.tasks:
            if task.done():
                await task

    async def stop(self) -> None:
        """Abort the streams."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def forget(self) -> None:
        """Drop all arrivals but each stream's last chunk, before a new window."""
        for times in self.arrivals:
            del times[:-1]

    async def _go_on(self, seed: int) -> None:
        source = random.Random(seed)
        params = SamplingParams(temperature=0.0, max_tokens=self.output_len, ignore_eos=True, detokenize=False)
        while True:
            times: list[float] = []
            self.arrivals.append(times)
            prompt = random_ids(source, PROMPT_TOKENS, self.vocabulary)
            async with contextlib.aclosing(self.client.stream(prompt, params)) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids:
                        times.append(time.monotonic())


async def first_token(client: AsyncClient, adapter: str, prompt: list[int]) -> float:
    """Return seconds from submit to the first token."""
    started = time.monotonic()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    async with contextlib.aclosing(client.stream(prompt, params, adapter)) as chunks:
        async for chunk in chunks:
            if chunk.token_ids:
                return time.monotonic() - started
    raise RuntimeError(f"a request with adapter {adapter!r} ended without a token")


async def cold_starts(client: AsyncClient, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, print the table, and return its rows.

    Raises ValueError if the server has no resident adapter to compare with.
    """
    server = await client.connect()
    room = server.max_model_len - PROMPT_TOKENS
    if room < 2:
        raise ValueError(f"the server takes {server.max_model_len} tokens; workload C needs more than {PROMPT_TOKENS}")
    source = random.Random(options.seed)
    samples: dict[str, list[tuple[float, float]]] = {place: [] for place in PLACES}
    background = Background(client, server.vocabulary, min(room, 4096))

    async def adapter_at(place: str) -> str | None:
        found = [
            adapter.name for adapter in await client.list_adapters() if adapter.where == place and not adapter.running
        ]
        return source.choice(found) if found else None

    try:
        await background.start(options.background, options.seed)
        for _ in range(options.repeats):
            for place in PLACES:
                adapter = await adapter_at(place)
                if adapter is None and place == "gpu":
                    adapter = await adapter_at("cpu") or await adapter_at("disk")
                    if adapter is None:
                        raise ValueError(
                            "the server has no idle adapter; register some with --lora-modules or --adapter-dir"
                        )
                    # makes it resident
                    await first_token(client, adapter, random_ids(source, PROMPT_TOKENS, server.vocabulary))
                if adapter is None:
                    continue
                await asyncio.sleep(SETTLE_SECONDS)
                await background.check()
                start = time.monotonic()
                background.forget()
                took = await first_token(client, adapter, random_ids(source, PROMPT_TOKENS, server.vocabulary))
                await asyncio.sleep(SETTLE_SECONDS)
                samples[place].append((took, longest_gap(background.arrivals, start, time.monotonic())))
    finally:
        await background.stop()
    rows = rows_of(samples)
    for text in table(rows, options.background):
        print(text)
    return rows


def rows_of(samples: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return a row for each place of the adapter, in milliseconds: medians, and the increase over a resident one."""
    middle = {
        place: tuple(1e3 * statistics.median(column) for column in zip(*taken, strict=True))
        for place, taken in samples.items()
        if taken
    }
    resident = middle.get("gpu", (float("nan"), float("nan")))
    return [
        {
            "adapter": NAMES[place],
            "samples": len(samples[place]),
            "ttft_ms": first,
            "cold_start_ms": first - resident[0],
            "worst_cold_start_ms": 1e3 * max(took for took, _ in samples[place]) - resident[0],
            "others_longest_gap_ms": gap,
            "others_gap_growth_ms": gap - resident[1],
        }
        for place, (first, gap) in middle.items()
    ]


def table(rows: list[dict[str, Any]], background: int) -> list[str]:
    """Return the rows as lines of text."""
    lines = [
        f"{'adapter in':<12}{'samples':>8}{'TTFT':>10}{'cold start':>12}{'worst':>10}{'others gap':>12}{'growth':>10}"
    ]
    lines += [
        f"{row['adapter']:<12}{row['samples']:>8}{shown(row['ttft_ms']):>10}{shown(row['cold_start_ms']):>12}{shown(row['worst_cold_start_ms']):>10}"
        f"{shown(row['others_longest_gap_ms']):>12}{shown(row['others_gap_growth_ms']):>10}"
        for row in rows
    ]
    missing = [name for name in NAMES.values() if name not in {row["adapter"] for row in rows}]
    lines += [f"no adapter was found in: {', '.join(missing)}"] if missing else []
    return [
        *lines,
        f"medians in ms; cold start: TTFT minus that of a resident adapter, while {background} others decode; gap: "
        "their longest meanwhile",
    ]
