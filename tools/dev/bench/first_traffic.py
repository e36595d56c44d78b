"""Time the first tokens and the pauses of a server that has just started, and of one whose load changes.

    python -c "from pathlib import Path; from sidestream.tools.bench.random_model import LLAMA_8B, write_model;
        write_model(Path('m8b'), LLAMA_8B, adapters=8, rank=32)"
    sidestream serve m8b --load-format dummy --bind ipc:///tmp/engine.sock --lora-modules ...
    python -m sidestream.tools.dev.bench.first_traffic ipc:///tmp/engine.sock --minutes 10

It waits until the server is ready, sends 1, 4, 16, 64 and 256 streams at once (base model and adapters mixed, prompts
of 20 to 700 tokens), then for `--minutes` streams whose number, lengths and sampling change, then the same levels
again. A gap is the time between two chunks of one stream.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....runtime.api.sampling_params import SamplingParams
from ....runtime.client.async_client import AsyncClient
from ...bench.serving.report import Record
from ...bench.serving.traffic import random_ids
from ...options.engine import positive
from ...options.environment import write_figures

LEVELS = (1, 4, 16, 64, 256)
PROMPT_TOKENS = (20, 700)
ANSWER_TOKENS = 64
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.7, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logprobs": 3},
]
PAUSE = 0.5  # seconds: gaps above it are counted


class Load:
    """Random streams over one connection.

    names  the adapters, and None for the base model
    """

    def __init__(self, client: AsyncClient, names: Sequence[str | None], vocabulary: int, seed: int) -> None:
        self._client, self._names, self._vocabulary = client, names, vocabulary
        self._random = random.Random(seed)

    async def together(self, count: int, answer_tokens: int, greedy: bool = True) -> list[Record]:
        """Send `count` requests at once and wait for their answers."""
        return await asyncio.gather(*(self._one(answer_tokens, greedy) for _ in range(count)))

    async def changing(self, seconds: float, most: int) -> list[Record]:
        """Send requests whose number at once changes every few seconds."""
        streams: list[Record] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            count = round(most ** self._random.random())
            length = round(8 * 64 ** self._random.random())
            streams += await self.together(count, length, greedy=self._random.random() < 0.5)
        return streams

    async def _one(self, answer_tokens: int, greedy: bool) -> Record:
        source = self._random
        prompt = random_ids(source, source.randint(*PROMPT_TOKENS), self._vocabulary)
        sampling = {"temperature": 0.0} if greedy else source.choice(SAMPLING)
        params = SamplingParams(max_tokens=answer_tokens, ignore_eos=True, detokenize=False, **sampling)
        stream, chunks = Record(time.monotonic()), self._client.stream(prompt, params, source.choice(self._names))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                stream.arrived(time.monotonic(), len(chunk.token_ids))
        return stream


def figures(streams: Sequence[Record]) -> dict[str, float]:
    """Return the median and longest first token, the longest gap (seconds), and the number of gaps above PAUSE."""
    first = [stream.time_to_first for stream in streams]
    gaps = [gap for stream in streams for gap in stream.gaps]
    return {
        "streams": len(streams),
        "first_token_median": statistics.median(first),
        "first_token_longest": max(first),
        "gap_longest": max(gaps, default=0.0),
        "gaps_above_pause": sum(gap > PAUSE for gap in gaps),
    }


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each level, for the changing load, and for each level after it."""
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    async with AsyncClient(options.address, connect_timeout=options.connect_timeout, name="first traffic") as client:
        server = await client.connect()
        ready = time.monotonic() - begin
        names: list[str | None] = [None, *(adapter.name for adapter in await client.list_adapters())]
        load = Load(client, names, server.vocabulary, options.seed)
        print(f"ready after {ready:.1f} s; times in seconds")

        async def note(phase: str, streams: Sequence[Record]) -> None:
            compiled = (await client.stats()).get("kernels_compiled_in_steps_total", float("nan"))
            row = {"phase": phase, **figures(streams), "kernels_compiled_in_steps": compiled}
            rows.append(row)
            print(
                f"{phase:<22}{row['streams']:>7}  first token {row['first_token_median']:6.3f} median "
                f"{row['first_token_longest']:6.3f} longest  gap {row['gap_longest']:6.3f} longest, "
                f"{row['gaps_above_pause']:>3} above {PAUSE}  compiled {compiled:g}",
                flush=True,
            )

        for level in LEVELS:
            await note(f"first: {level} at once", await load.together(level, ANSWER_TOKENS))
        changing = await load.changing(60 * options.minutes, min(256, server.max_num_seqs))
        await note(f"{options.minutes:g} minutes", changing)
        for level in LEVELS:
            await note(f"again: {level} at once", await load.together(level, ANSWER_TOKENS))
    return [{"ready_seconds": ready}, *rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="where the server is bound, such as ipc:///tmp/engine.sock")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of changing load (default: 10)")
    parser.add_argument("--connect-timeout", type=positive, default=600, metavar="S", help="(default: 600)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument("--output-json", type=Path, default=Path("first-traffic.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    rows = asyncio.run(measure(options))
    write_figures(options.output_json, {"rows": rows})


if __name__ == "__main__":
    main()
