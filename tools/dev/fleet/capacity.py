"""`python -m sidestream.tools.dev.fleet.capacity`: engines needed for a load, by cost model and router.

Prints the table of docs/scaling.md: for each number of engines requests and tokens per second at a share of their
highest rate, and the number of adapters with which a request still finds its own on the GPU.
"""

import argparse
import random
import sys

from ...bench.serving.report import percentile
from ...options.models import add_gpu, gpu_for
from ..simulate_fleet.__main__ import PROMPT, TOKENS, arrivals_of, rate_of
from ..simulate_fleet.engines import Engine, Sizes, simulate
from ..simulate_fleet.policies import Routed
from ..simulate_fleet.steps import estimated

LOAD = 0.5
ADAPTERS = (100, 1000, 10_000)


def main(arguments: list[str] | None = None) -> int:
    """Return 0."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.dev.fleet.capacity", description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    parser.add_argument("--requests", type=int, default=6000, metavar="N", help="in each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_gpu(parser)
    options = parser.parse_args(arguments)
    gpu = gpu_for(options)
    sizes, times = Sizes(), estimated(gpu)
    rate = rate_of(times, sizes, LOAD)
    print(
        f"Llama-3.1-8B, an {gpu.name} for each engine, by the cost model; prompts of {PROMPT} tokens, answers of "
        f"{TOKENS}; {LOAD:.0%} of the highest rate, adapters asked for by Zipf's law, {sizes.slots} at once on a GPU\n"
    )
    columns = "".join(f" | {count:,} adapters: on GPU, p99 first token" for count in ADAPTERS)
    print(f"| engines | requests/s | output tokens/s{columns} |\n| ---: | ---: | ---:{' | ---:' * len(ADAPTERS)} |")
    for engines in options.engines:
        cells = [str(engines), f"{engines * rate:.0f}", f"{engines * rate * TOKENS:,.0f}"]
        for adapters in ADAPTERS:
            source = random.Random(options.seed)
            arrivals = arrivals_of(options.requests, engines * rate, adapters, 1.0, source)
            served = simulate(
                arrivals, [Engine(sizes, times) for _ in range(engines)], Routed(engines, sizes, options.seed)
            )
            kept = served[len(served) // 5 :]
            hits = sum(each.held for each in kept) / len(kept)
            cells.append(f"{hits:.0%}, {1e3 * percentile([each.first for each in kept], 0.99):.0f} ms")
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
