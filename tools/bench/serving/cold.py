"""Workload C of `sidestream bench serve`: what an adapter's cold start costs its own request, and the others."""

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
    """Streams that decode all the time; `arrivals` holds, for each, when its chunks came."""

    client: AsyncClient
    vocabulary: int
    output_len: int
    arrivals: list[list[float]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self, count: int, seed: int) -> None:
        """Starts `count` streams of the base model and waits until each has brought something."""
        self.tasks = [asyncio.create_task(self._go_on(seed + index)) for index in range(count)]
        while sum(bool(times) for times in self.arrivals) < count:
            await self.check()
            await asyncio.sleep(0.01)

    async def check(self) -> None:
        """Raises what ended a stream."""
        for task in self.tasks:
            if task.done():
                await task

    async def stop(self) -> None:
        """Aborts the streams."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def forget(self) -> None:
        """Drop what a window that begins now does not need: all but each stream's last chunk."""
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
    """Seconds from submit to the first token."""
    started = time.monotonic()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    async with contextlib.aclosing(client.stream(prompt, params, adapter)) as chunks:
        async for chunk in chunks:
            if chunk.token_ids:
                return time.monotonic() - started
    raise RuntimeError(f"a request with adapter {adapter!r} ended without a token")


async def cold_starts(client: AsyncClient, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures, prints the table, returns its rows.

    Raises ValueError when the server has no resident adapter to compare with.
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
                    # brings it in
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
    """One row for each place that was measured, in milliseconds: medians of first token and of the others' longest
    gap, and the growth over resident.
    """
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
    """The rows as lines of text."""
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
