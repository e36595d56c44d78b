"""What an adapter that is not on the GPU costs: workload C.

    python -m sidestream.tools.dev.bench.cold_adapters [--background 32] [--repeats 12]

While `--background` requests decode (a third each on the base model and on two resident adapters), single requests of
128 random prompt tokens arrive one after the other: for an adapter that is resident, for one that is in page-locked
host memory, for one that was packed before and is kept on disk, and for one of which only PEFT's files are there (all
files lie in the operating system's cache). Printed are the times from submit to first token, what a cold one costs
beyond a resident one, and the longest gap between two steps that the others saw between submit and first token.
Llama-3.1-8B's shape with random weights, adapters of rank 32 on all projections.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ...bench.random_model import write_random_adapter
from ...options.engine import positive
from ...options.environment import collect
from ...options.models import LLAMA_8B

PROMPT = 128
KINDS = ("resident", "host memory", "disk, packed", "disk")
WARM_UPS = 3
OUTPUT = 1024
"""More than the background makes during a probe, reading from disk included: it must not end."""


class Bench:
    """An engine with its background requests."""

    def __init__(self, llm: Any, background: int, adapters: list[str]) -> None:
        self.llm, self.engine = llm, llm.engine
        self._source = random.Random(0)
        self._vocabulary = llm.config.vocab_size
        self._made = 0
        self._names: list[str] = []
        self._background = background
        self._choices = [None, adapters[0], adapters[1]]

    def prompt(self) -> list[int]:
        """Random tokens, so that nothing is found in the prefix cache."""
        return [self._source.randrange(self._vocabulary) for _ in range(PROMPT)]

    def ask(self, adapter: str | None, output: int) -> str:
        """Submit a request; returns its id."""
        from ....runtime.api.request import Request
        from ....runtime.api.sampling_params import SamplingParams

        self._made += 1
        name = str(self._made)
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        self.engine.add(Request(name, None, self.prompt(), params, adapter), stream=True)
        return name

    def fill(self) -> None:
        """Start the background again, so that its contexts stay short, and let it come to its steady state."""
        for name in self._names:
            self.engine.abort(name)
        self._names = [self.ask(self._choices[index % 3], OUTPUT) for index in range(self._background)]
        for _ in range(self._background + 10):
            self.engine.step()

    def check(self) -> None:
        """Raises RuntimeError if the background has come to an end."""
        running = len(self.engine.scheduler.states.running)
        if running < self._background:
            raise RuntimeError(
                f"only {running} of {self._background} background requests are left; the figures do not hold"
            )

    def probe(self, adapter: str) -> tuple[float, float]:
        """(milliseconds from submit to first token, the longest gap between steps meanwhile and in the two steps
        after).
        """
        begin = last = time.perf_counter()
        name = self.ask(adapter, 1)
        first, longest, after = 0.0, 0.0, 0
        while after < 2:
            deltas, _ = self.engine.step()
            now = time.perf_counter()
            if deltas:  # the background got its tokens
                longest, last = max(longest, now - last), now
            if any(delta.request_id == name for delta in deltas):
                first = now - begin
            after += first > 0
        return 1e3 * first, 1e3 * longest

    def gaps(self, steps: int) -> list[float]:
        """Milliseconds between steps when nothing else happens."""
        times = []
        last = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
            times.append(1e3 * (now := time.perf_counter()) - 1e3 * last)
            last = now
        return times

    def wait_for_memory(self, numbers: set[int]) -> None:
        """Until these adapters are in host memory."""
        stacks = self.engine.runner.stacks
        while not numbers <= set(stacks.store.numbers):
            time.sleep(0.01)


def measure(bench: Bench, names: list[str], repeats: int, cache: Any) -> dict[str, list[tuple[float, float]]]:
    """Each kind's probes, in turn. names: two of the background, one resident, the others cold. cache: where the
    packed ones are.
    """
    warm, cold = names[2], names[3:]
    numbers, store = bench.llm.registry.numbers, bench.engine.runner.stacks.store
    bench.wait_for_memory(set(numbers.values()))
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    turn = 0
    for repeat in range(repeats + WARM_UPS):
        for kind in KINDS:
            bench.fill()
            name = warm
            if kind != "resident":
                name = cold[turn % len(cold)]
                turn += 1
                bench.probe(warm)  # the other cold adapter's slot is the one that is given up
            if kind.startswith("disk"):
                store.forget(numbers[name])
            store.cache = cache if kind == "disk, packed" else None
            bench.gaps(8)
            sample = bench.probe(name)
            bench.check()
            if repeat >= WARM_UPS:
                times[kind].append(sample)
    return times


def kept(llm: Any, directory: Path) -> Any:
    """A cache in `directory` that holds every adapter packed. Raises RuntimeError when the disk does not take them."""
    from ....compiler.program.cache_folder import CacheFolder
    from ....runtime.adapters.disk_cache import SlotCache

    cache, store = SlotCache(CacheFolder(directory, sys.maxsize)), llm.engine.runner.stacks.store
    store.cache = cache
    for number, content_hash in llm.registry.hashes.items():
        store.release(store.prepare(number))
        store.keep(number, content_hash)
    if len(list(directory.glob("*.slot"))) < len(llm.registry.hashes):
        raise RuntimeError(
            f"the packed adapters could not all be written to {directory}; set TMPDIR to a disk with more room"
        )
    return cache


def report(times: dict[str, list[tuple[float, float]]], quiet: list[float]) -> None:
    """Prints the table."""
    print(
        f"between steps when nothing arrives: median {statistics.median(quiet):.2f} ms, longest of {len(quiet)} "
        f"{max(quiet):.2f} ms\n"
    )
    print(
        f"{'adapter in':<14}{'first token, ms':>28}{'beyond resident':>17}"
        f"{'longest gap of others, ms':>30}{'beyond resident':>17}"
    )
    base_first, base_gap = (statistics.median(sample[part] for sample in times["resident"]) for part in (0, 1))
    for kind, samples in times.items():
        firsts, gaps = sorted(sample[0] for sample in samples), sorted(sample[1] for sample in samples)
        first, gap = statistics.median(firsts), statistics.median(gaps)
        print(
            f"{kind:<14}{f'{first:.2f} ({firsts[0]:.2f}-{firsts[-1]:.2f})':>28}{first - base_first:>17.2f}"
            f"{f'{gap:.2f} ({gaps[0]:.2f}-{gaps[-1]:.2f})':>30}{gap - base_gap:>17.2f}"
        )
    print(f"\nmedian (least-most) of {len(times['resident'])} each")


def main() -> None:
    """Builds the engine and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--background", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=12)
    parser.add_argument("--cold", type=positive, default=3, help="adapters that take turns at being cold")
    parser.add_argument("--layers", type=positive, help="fewer layers than the model's 32, for a quick look")
    parser.add_argument("--hidden", type=positive, help="a smaller model, for a look without a GPU")
    options = parser.parse_args()
    from ....runtime.adapters.disk_cache import VARIABLE
    from ....runtime.llm import LLM

    config = dict(LLAMA_8B)
    if options.layers:
        config["num_hidden_layers"] = options.layers
    if options.hidden:
        config |= {
            "hidden_size": options.hidden,
            "intermediate_size": 2 * options.hidden,
            "num_attention_heads": options.hidden // 64,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "vocab_size": 512,
        }
    for name, value in collect().items():
        print(f"{name}: {value}")
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        os.environ[VARIABLE] = "0"  # random adapters do not belong into the user's cache
        begin = time.perf_counter()
        paths = {
            f"random-{index}": write_random_adapter(Path(scratch) / str(index), config, 32, index)
            for index in range(3 + options.cold)
        }
        size = sum(file.stat().st_size for file in (Path(scratch) / "0").iterdir())
        print(f"{len(paths)} adapters of {size / 1e6:.0f} MB written in {time.perf_counter() - begin:.1f} s")
        begin = time.perf_counter()
        llm = LLM(
            config,
            paths,
            load_format="dummy",
            max_loras=4,
            max_lora_rank=32,
            max_num_seqs=options.background + 1,
            max_num_batched_tokens=max(512, options.background + 1),
            max_model_len=PROMPT + OUTPUT,
            show_progress=True,
        )
        print(
            f"ready after {time.perf_counter() - begin:.1f} s",
            {name: round(seconds, 1) for name, seconds in llm.seconds.items()},
            flush=True,
        )
        bench = Bench(llm, options.background, list(paths))
        times = measure(bench, list(paths), options.repeats, kept(llm, Path(scratch) / "kept"))
        report(times, bench.gaps(200))


if __name__ == "__main__":
    main()
