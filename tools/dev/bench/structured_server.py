"""What constraints cost a server's steps: `python -m sidestream.tools.dev.bench.structured_server MODEL`.

    python -m sidestream.tools.bench.model_directory m8b
    python -m sidestream.tools.dev.bench.structured_server m8b -- --load-format dummy --max-model-len 1024

It starts `sidestream serve MODEL` with the options after `--`, and asks for answers that begin together,
without constraints and with one that all share, in turn. A step's time is what an answer of `--long` tokens takes
longer than one of `--short`, by the token.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ....runtime.api.sampling_params import SamplingParams
from ....runtime.client.client import Client
from ....runtime.demo_model import DEMO_MODEL
from ...bench.latency import ENDLESS
from ...options.engine import positive

PROMPT = 128
START_SECONDS = 600.0


@contextmanager
def served(model: Path, arguments: Sequence[str]) -> Iterator[Client]:
    """A client of a server of its own."""
    with tempfile.TemporaryDirectory(prefix="sidestream_structured_") as folder:
        address = f"ipc://{folder}/engine.sock"
        command = [sys.executable, "-m", "sidestream.tools.cli", "serve", str(model), "--no-http", "--bind", address]
        with subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL) as process:
            try:
                with Client(address, connect_timeout=START_SECONDS) as client:
                    yield client
            finally:
                process.terminate()


def seconds(client: Client, prompts: Sequence[Sequence[int]], length: int, constrained: bool) -> float:
    """What answers of so many tokens take. Raises RuntimeError where some are shorter."""
    fits = {"json": ENDLESS} if constrained else None
    params = SamplingParams(
        temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, structured_outputs=fits
    )
    begin = time.perf_counter()
    outputs = client.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    took = time.perf_counter() - begin
    if any(len(output.outputs[0].token_ids) != length for output in outputs):
        raise RuntimeError(f"an answer has not the {length} tokens that were asked for")
    return took


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m sidestream.tools.dev.bench.structured_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", type=Path, default=Path(DEMO_MODEL))
    parser.add_argument("--answers", type=positive, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--short", type=positive, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--long", type=positive, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=6, metavar="N", help="(default: %(default)s)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, more = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    options = parser.parse_args(own)
    vocabulary = int(json.loads((options.model / "config.json").read_text())["vocab_size"])
    source = random.Random(0)
    prompts = [[source.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(options.answers)]
    found: dict[bool, list[float]] = {False: [], True: []}
    with served(options.model, ["--max-num-seqs", str(options.answers), *more]) as client:
        for constrained in (False, True):
            seconds(client, prompts, options.short, constrained)  # lexers grow, kernels are compiled
        for _ in range(options.repeats):
            for constrained, steps in found.items():
                long, short = (seconds(client, prompts, each, constrained) for each in (options.long, options.short))
                steps.append(1e3 * (long - short) / (options.long - options.short))
    print(f"{options.answers} answers over {vocabulary} tokens, at once through a server")
    print(f"{'ms a step':<22}{'median':>9}{'least':>9}{'most':>9}")
    for constrained, steps in found.items():
        name = "with a constraint" if constrained else "without constraints"
        print(f"{name:<22}{statistics.median(steps):>9.3f}{min(steps):>9.3f}{max(steps):>9.3f}")


if __name__ == "__main__":
    main()
