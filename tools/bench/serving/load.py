"""Send the planned requests of `sidestream bench serve` on time, and collect their records."""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from pathlib import Path
from typing import Any

from ....runtime.api.errors import RequestError, ServerError
from ....runtime.api.sampling_params import SamplingParams
from ....runtime.client.async_client import AsyncClient
from ...options.environment import write_figures
from . import report as serve_report
from .cold import cold_starts
from .report import Record, live_line, summarize
from .traffic import Planned, plan


async def measure(options: argparse.Namespace) -> int:
    """Run the chosen workload on one connection."""
    async with AsyncClient(
        options.address, keys=options.keys, connect_timeout=options.connect_timeout, name="bench serve"
    ) as client:
        server = await client.connect()
        adapters = await adapter_names(client, options)
        print(
            f"{server.model} at {client.address}: max_model_len {server.max_model_len}, max_num_seqs "
            f"{server.max_num_seqs}, {len(adapters)} adapters"
        )
        if options.workload == "C":
            results = await cold_starts(client, options)
        else:
            results = await traffic(client, options, adapters)
    fields = {
        name: value
        for name, value in vars(options).items()
        if name not in ("run", "output_json", "keys", "adapter_dir", "address")
    }
    content = {
        "workload": options.workload,
        "server": {
            "model": Path(server.model).name,
            "version": server.server_version,
            "max_model_len": server.max_model_len,
            "max_num_seqs": server.max_num_seqs,
            "max_adapter_slots": server.max_adapter_slots,
            "adapters": len(adapters),
        },
        "options": fields,
        "rows": results,
    }
    write_figures(options.output_json, content)
    return 0 if any(row.get("complete", 1) for row in results) else 1


async def adapter_names(client: AsyncClient, options: argparse.Namespace) -> list[str]:
    """Return the adapters, registered first with --adapter-dir."""
    known = {adapter.name for adapter in await client.list_adapters()}
    if options.adapter_dir is not None:
        folders = sorted(path.parent for path in options.adapter_dir.glob("*/adapter_config.json"))[
            : options.num_adapters
        ]
        for place, folder in enumerate(folders):
            if folder.name not in known:
                await client.load_adapter(folder.name, folder.absolute())
                known.add(folder.name)
            if sys.stderr.isatty():
                print(
                    f"\r\x1b[2Kregistering adapters {place + 1}/{len(folders)}",
                    end="\n" if place + 1 == len(folders) else "",
                    file=sys.stderr,
                )
    return sorted(known)[: options.num_adapters]


async def traffic(client: AsyncClient, options: argparse.Namespace, adapters: list[str]) -> list[dict[str, Any]]:
    """Run workload S at each rate."""
    server = await client.connect()
    longest = options.input_len[1] + options.output_len[1]
    if longest > server.max_model_len:
        raise ValueError(
            f"--input-len and --output-len are {longest} tokens, the server accepts {server.max_model_len}; lower "
            "one of them"
        )
    results: list[dict[str, Any]] = []
    popular = list(adapters)
    random.Random(options.seed).shuffle(popular)
    for per_second in options.rate:
        planned = plan(
            per_second,
            options.duration,
            options.num_requests,
            tuple(options.input_len),
            tuple(options.output_len),
            popular,
            options.seed,
        )
        if not planned:
            raise ValueError(
                f"no request arrives within --duration {options.duration:g} at --rate {per_second:g}; raise one of them"
            )
        before = await client.stats()
        records, took = await send_all(client, planned, server.vocabulary, planned[-1].at + options.drain)
        figures = summarize(
            records, took, options.slo_ttft, options.slo_itl, options.stall, before, await client.stats()
        )
        if not results:
            print(serve_report.header())
        print(serve_report.line(per_second, figures), flush=True)
        results.append({"rate": per_second, **figures})
    print(
        f"\ntimes in ms; goodput: complete, first token within {options.slo_ttft:g} s, then "
        f"{options.slo_itl * 1e3:g} ms per token on average;"
    )
    print(
        f"stalls: gaps above {options.stall * 1e3:g} ms; hit rate: requests whose adapter was on the GPU when they "
        "were admitted, as the server counts"
    )
    for row in results:
        if row["errors"]:
            print(f"rate {row['rate']:g}: " + ", ".join(f"{count} x {code}" for code, count in row["errors"].items()))
    return results


async def send_all(
    client: AsyncClient, planned: list[Planned], vocabulary: int, limit: float
) -> tuple[list[Record], float]:
    """Send each request on time, and abort unfinished ones after `limit` seconds. Returns (records, seconds)."""
    records = [Record(planned=request.at, wanted=request.output_len, adapter=request.adapter) for request in planned]
    started = time.monotonic()
    tasks: list[asyncio.Task[None]] = []

    async def arrive() -> None:
        for request, record in zip(planned, records, strict=True):
            prompt = request.prompt(vocabulary)
            await asyncio.sleep(max(0.0, request.at - (time.monotonic() - started)))
            tasks.append(asyncio.create_task(send_one(client, request, prompt, record, started)))

    show = asyncio.create_task(show_live(records, started))
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await arrive()
                await asyncio.gather(*tasks)
    finally:
        show.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(show, *tasks, return_exceptions=True)
    for record in records:
        if not record.finished and record.error is None:
            record.error = "not_finished"
    return records, time.monotonic() - started


async def send_one(client: AsyncClient, request: Planned, prompt: list[int], record: Record, started: float) -> None:
    """Send one request, and record its error."""
    params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)
    record.sent = time.monotonic() - started
    try:
        async with contextlib.aclosing(client.stream(prompt, params, request.adapter)) as chunks:
            async for chunk in chunks:
                record.arrived(time.monotonic() - started, len(chunk.token_ids))
        record.finished = record.tokens == request.output_len
        record.error = None if record.finished else "short_answer"
    except ServerError as problem:
        record.error = problem.code
    except RequestError:
        record.error = "invalid_request"


async def show_live(records: list[Record], started: float) -> None:
    """Rewrite one line every second, on a terminal."""
    if not sys.stderr.isatty():
        return
    try:
        while True:
            await asyncio.sleep(1)
            print(f"\r\x1b[2K{live_line(records, time.monotonic() - started)}", end="", file=sys.stderr, flush=True)
    finally:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
