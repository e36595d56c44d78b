"""`sidestream bench serve`: open-loop traffic (workload S) and cold starts of adapters (C) on a running server."""

import argparse
from pathlib import Path
from typing import Any

from ...options.client import add_connection_options, seconds
from ...options.engine import add_command, add_value, check_output, number

MAX_REQUESTS = 100_000
DESCRIPTION = """\
Measure a running server, at any address.

  --workload S   requests arrive as a Poisson process and do not wait for one another; prompt and output lengths are
                 log-uniform, each request picks an adapter with p(k) ~ 1/k among the first --num-adapters that the
                 server lists
  --workload C   time to the first token of requests with an adapter in host memory or on disk, minus that of a resident
                 one, while --background others decode; and the longest gap of the others

Prompts are random token ids and end-of-sequence is ignored. The client measures the times: run it
on the server's machine, or they include the network."""

EXAMPLES = """\
examples:
  sidestream bench serve                                             2 requests per second for a minute
  sidestream bench serve --rate 4 8 16 --duration 120                three loads in turn
  sidestream bench serve --input-len 16 64 --output-len 8 32         a small model
  sidestream bench serve --adapter-dir adapters/ --num-adapters 200  register these adapters first
  sidestream bench serve --workload C --repeats 20"""


rate = number("rate", 0, 10_000, " requests per second", above=True)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the bench to the `sidestream bench` parser."""
    usage = "%(prog)s [--workload S|C] [--rate R ...] [options]"
    parser = add_command(
        commands, "serve", "traffic and cold starts against a running server", DESCRIPTION, EXAMPLES, run, usage
    )
    parser.add_argument("--workload", choices=("S", "C"), default="S", help="(default: %(default)s)")
    add_value(parser, "--num-adapters", 200, "adapters to use if they exist; 0: none", int)
    parser.add_argument(
        "--adapter-dir", type=Path, metavar="DIR", help="register all adapters in DIR, a path on the server, first"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    add_value(parser, "--output-json", Path("bench-serve.json"), "file of the figures", Path, "FILE")
    group = parser.add_argument_group("workload S")
    add_value(group, "--rate", [2.0], "requests per second, measured in turn", rate, "R", nargs="+")
    add_value(group, "--duration", 60.0, "seconds of arrivals for each rate", seconds, "S")
    add_value(group, "--drain", 60.0, "seconds to wait for the last answers, then abort", seconds, "S")
    add_value(group, "--num-requests", MAX_REQUESTS, "maximum number of requests for each rate")
    add_value(group, "--input-len", (64, 2048), "prompt tokens", metavar=("LOW", "HIGH"), nargs=2)
    add_value(group, "--output-len", (16, 512), "output tokens", metavar=("LOW", "HIGH"), nargs=2)
    add_value(group, "--slo-ttft", 2.0, "limit of the first token of a good request, in seconds", seconds, "S")
    add_value(group, "--slo-itl", 0.1, "limit of its mean time per other token", seconds, "S")
    add_value(group, "--stall", 0.1, "a longer gap is a stall", seconds, "S")
    group = parser.add_argument_group("workload C")
    add_value(group, "--background", 32, "streams that decode at the same time")
    add_value(group, "--repeats", 10, "cold starts of each kind")
    add_connection_options(parser)


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot be measured, before anything is sent."""
    for name in ("input_len", "output_len"):
        low, high = getattr(options, name)
        if low > high:
            raise ValueError(f"--{name.replace('_', '-')} {low} {high}: give the lower bound first")
    if not 0 <= options.num_adapters <= MAX_REQUESTS or options.num_requests > MAX_REQUESTS:
        raise ValueError(f"--num-adapters and --num-requests must be at most {MAX_REQUESTS}")
    check_output("--output-json", options.output_json)
    if options.adapter_dir is not None and not options.adapter_dir.is_dir():
        raise ValueError(f"--adapter-dir {options.adapter_dir} is not a directory; name one with adapters in it")


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; return 1 if no request was complete."""
    check(options)
    import asyncio

    from .load import measure

    return asyncio.run(measure(options))
