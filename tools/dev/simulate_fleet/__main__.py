"""Entry point of `python -m sidestream.tools.dev.simulate_fleet`."""

import argparse
import itertools
import random
import sys

from ...bench.serving.report import percentile
from ...options.models import add_gpu, gpu_for
from .engines import Arrival, Engine, Policy, Served, Sizes, simulate
from .policies import RoundRobin, Routed, TwoChoices
from .steps import StepTimes, estimated

PROMPT, TOKENS = 512, 128
"""Mean tokens of prompts and answers; both are drawn from half to one and a half of it."""


def arrivals_of(count: int, rate: float, adapters: int, exponent: float, source: random.Random) -> list[Arrival]:
    """Yield Poisson arrivals, `rate` per second; adapter k is drawn in proportion to k ** -exponent."""
    weights = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(adapters)))
    chosen = source.choices(range(adapters), cum_weights=weights, k=count)
    now, found = 0.0, []
    for adapter in chosen:
        now += source.expovariate(rate)
        prompt, tokens = (source.randint(mean // 2, mean * 3 // 2) for mean in (PROMPT, TOKENS))
        found.append(Arrival(now, adapter, prompt, tokens))
    return found


def rate_of(times: StepTimes, sizes: Sizes, load: float) -> float:
    """Return requests per second for this share of the highest rate of an engine, with all its slots in use.

    A request takes the time of its prompt, and in each of its steps its part of the step.
    """
    step = times.step(sizes.capacity, min(sizes.capacity, sizes.slots)) / sizes.capacity
    return load / (PROMPT * times.prompt + TOKENS * step)


def row(engines: int, name: str, served: list[Served]) -> str:
    """Return one line of the table, without the first fifth, in which slots fill."""
    kept = served[len(served) // 5 :]
    hits = sum(each.held for each in kept) / len(kept)
    first = [1e3 * each.first for each in kept]
    return f"{engines:7}  {name:12} {hits:8.1%} {percentile(first, 0.5):9.1f} {percentile(first, 0.99):9.1f}"


def main(arguments: list[str] | None = None) -> int:
    """Return 0."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.dev.simulate_fleet", description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 3, 10, 100, 1000], metavar="N")
    parser.add_argument("--adapters", type=int, default=10_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=60, metavar="N", help="for each engine (default: %(default)s)")
    parser.add_argument("--least", type=int, default=6000, metavar="N", help="but at least (default: %(default)s)")
    parser.add_argument("--zipf", type=float, default=1.0, metavar="S", help="exponent (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.5, help="share of the highest rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_gpu(parser)
    options = parser.parse_args(arguments)
    gpu = gpu_for(options)
    sizes, times = Sizes(), estimated(gpu)
    print(
        f"{options.adapters} adapters, Zipf {options.zipf:g}, load {options.load:g}; "
        f"each engine: {sizes.capacity} requests and {sizes.slots} adapters at once, "
        f"{1e3 * sizes.load_seconds:g} ms to copy one\n"
        f"Llama-3.1-8B on an {gpu.name} by the cost model: "
        + ", ".join(f"{1e3 * times.step(count, 32):.2f} ms a step at {count}" for count in (1, 64, 128))
        + f", {1e3 * PROMPT * times.prompt:.1f} ms for a prompt of {PROMPT} tokens\n\n"
        "                        adapter   first token, ms\n"
        "engines  policy          on GPU       p50       p99"
    )
    for engines in options.engines:
        source = random.Random(options.seed)
        count = max(options.least, options.requests * engines)
        rate = engines * rate_of(times, sizes, options.load)
        arrivals = arrivals_of(count, rate, options.adapters, options.zipf, source)
        policies: dict[str, Policy] = {
            "router": Routed(engines, sizes, options.seed),
            "two choices": TwoChoices(engines, options.seed),
            "round robin": RoundRobin(engines),
        }
        for name, policy in policies.items():
            served = simulate(arrivals, [Engine(sizes, times) for _ in range(engines)], policy)
            print(row(engines, name, served), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
