"""`sidestream bench serve`: open-loop traffic (workload S) and cold starts of adapters (C) on a running server."""

import argparse
from pathlib import Path
from typing import Any

from ...options.client import add_connection_options, seconds
from ...options.engine import check_output, positive

MOST_REQUESTS = 100_000
DESCRIPTION = """\
Measure a running server, at any address.

  --workload S   requests arrive as a Poisson process and do not wait for one another; prompt and output lengths are
                 log-uniform, each request picks an adapter with p(k) ~ 1/k among the first --num-adapters that the
                 server lists
  --workload C   time to the first token of requests whose adapter is in host memory or on disk, minus that of a
                 resident one, while --background others decode; and the longest gap of the others meanwhile

Prompts are random token ids and end-of-sequence is ignored. The client measures the times: run it
on the server's machine, or they include the network."""

EXAMPLES = """\
examples:
  sidestream bench serve                                             2 requests per second for a minute
  sidestream bench serve --rate 4 8 16 --duration 120                three loads in turn
  sidestream bench serve --input-len 16 64 --output-len 8 32         a small model
  sidestream bench serve --adapter-dir adapters/ --num-adapters 200  register these adapters first
  sidestream bench serve --workload C --repeats 20"""


def rate(text: str) -> float:
    """Parse requests per second."""
    value = float(text)
    if not 0 < value <= 10_000:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 10000 requests per second")
    return value


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the bench to the `sidestream bench` parser."""
    parser = commands.add_parser(
        "serve",
        help="traffic and cold starts against a running server",
        usage="%(prog)s [--workload S|C] [--rate R ...] [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", choices=("S", "C"), default="S", help="(default: %(default)s)")
    parser.add_argument(
        "--num-adapters",
        type=int,
        default=200,
        metavar="N",
        help="adapters to use, as far as there are; 0: none (default: %(default)s)",
    )
    parser.add_argument(
        "--adapter-dir",
        type=Path,
        metavar="DIR",
        help="register each adapter directory in DIR (as the server sees it) under its name first",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--output-json",
        type=Path,
        default=Path("bench-serve.json"),
        metavar="FILE",
        help="where the figures go (default: %(default)s)",
    )
    group = parser.add_argument_group("workload S")
    group.add_argument(
        "--rate",
        type=rate,
        nargs="+",
        default=[2.0],
        metavar="R",
        help="requests per second; several are measured in turn (default: 2)",
    )
    group.add_argument(
        "--duration",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds of arrivals for each rate (default: %(default)s)",
    )
    group.add_argument(
        "--drain",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait for the last answers, then abort (default: %(default)s)",
    )
    group.add_argument(
        "--num-requests",
        type=positive,
        default=MOST_REQUESTS,
        metavar="N",
        help="at most so many for each rate (default: %(default)s)",
    )
    group.add_argument(
        "--input-len",
        type=positive,
        nargs=2,
        default=(64, 2048),
        metavar=("LOW", "HIGH"),
        help="prompt tokens (default: 64 2048)",
    )
    group.add_argument(
        "--output-len",
        type=positive,
        nargs=2,
        default=(16, 512),
        metavar=("LOW", "HIGH"),
        help="output tokens (default: 16 512)",
    )
    group.add_argument(
        "--slo-ttft",
        type=seconds,
        default=2.0,
        metavar="S",
        help="a good request's first token comes within S (default: %(default)s)",
    )
    group.add_argument(
        "--slo-itl",
        type=seconds,
        default=0.1,
        metavar="S",
        help="and its others every S on average (default: %(default)s)",
    )
    group.add_argument(
        "--stall",
        type=seconds,
        default=0.1,
        metavar="S",
        help="a longer gap in a stream counts as a stall (default: %(default)s)",
    )
    group = parser.add_argument_group("workload C")
    group.add_argument(
        "--background",
        type=positive,
        default=32,
        metavar="N",
        help="streams that decode meanwhile (default: %(default)s)",
    )
    group.add_argument(
        "--repeats", type=positive, default=10, metavar="N", help="cold starts of each kind (default: %(default)s)"
    )
    add_connection_options(parser)
    parser.set_defaults(run=run)


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot be measured, before anything is sent."""
    for name in ("input_len", "output_len"):
        low, high = getattr(options, name)
        if low > high:
            raise ValueError(f"--{name.replace('_', '-')} {low} {high}: the lower bound comes first")
    if not 0 <= options.num_adapters <= MOST_REQUESTS or options.num_requests > MOST_REQUESTS:
        raise ValueError(f"--num-adapters and --num-requests must be at most {MOST_REQUESTS}")
    check_output("--output-json", options.output_json)
    if options.adapter_dir is not None and not options.adapter_dir.is_dir():
        raise ValueError(f"--adapter-dir {options.adapter_dir} is no directory")


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; return 1 if no request was complete."""
    check(options)
    import asyncio

    from .load import measure

    return asyncio.run(measure(options))
