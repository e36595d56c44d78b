"""Run the arms of `sidestream eval` over the evaluation tasks: `python -m sidestream.tools.dev.eval30m DIR`.

DIR is the output of `eval30m.train`: base and adapters/NAME. Prints all tables, and for each arm whether it may be
called identical to bf16, with each condition that it does not meet. On four H200s it takes five minutes.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill

import torch

from ....compiler.pass_records import WIDTH
from ....runtime.text.tokenizer import load_tokenizer
from ...eval.arms import UNFUSED, chosen_arms
from ...eval.evaluate import Evaluation, Model, calibrate_model, calibration_texts, evaluate, rounding_texts
from ...eval.report import report
from ...options.engine import add_value, at_least
from ..command_line import dev_parser
from .suite import task_suite
from .tasks import TASKS
from .verdict import conditions, verdict


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = dev_parser("eval30m", __doc__)
    made.add_argument("directory", type=Path, metavar="DIR", help="the trained models")
    made.add_argument("--arms", default="", metavar="A,B", help="arms to compare with bf16 (default: all)")
    add_value(made, "--jobs", 8, "arms at once")
    add_value(made, "--tasks", 3500, "questions")
    add_value(made, "--documents", 400, "texts")
    add_value(made, "--needles", 50, "needles of each length and depth", at_least(0))
    add_value(made, "--max-length", 32768, "longest needle, in tokens")
    made.add_argument("--device", choices=("cpu", "cuda"), help="(default: a GPU if there is one)")
    made.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arms; return 1 if one did not run."""
    options = parser().parse_args(arguments)
    begin = time.perf_counter()

    def progress(stage: str) -> None:
        print(f"{time.perf_counter() - begin:7.1f} s  {stage}", file=sys.stderr, flush=True)

    directory = options.directory / "base"
    adapters = {name: options.directory / "adapters" / name for name in TASKS}
    arms = chosen_arms([name for name in options.arms.split(",") if name])
    suite = task_suite(directory, options.tasks, options.documents, options.needles, options.max_length)
    progress(f"{len(suite.questions)} questions, {sum(len(each.tokens) for each in suite.documents):,} tokens to read")
    calibration = None
    if any(arm.calibrated for arm in arms):
        calibration = calibrate_model(directory, adapters, calibration_texts(suite.documents), options.device)
    tokenizer = load_tokenizer(directory)
    texts = rounding_texts(tokenizer.encode) if tokenizer is not None else []
    jobs = options.jobs if options.device != "cpu" and torch.cuda.is_available() else 1
    found = evaluate(Model(directory, adapters, calibration, texts), suite, arms, options.device, progress, jobs)
    print(f"\n{report(found)}\n{verdicts(found)}")
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    return 1 if found.errors else 0


def verdicts(found: Evaluation) -> str:
    """Return each arm's verdict and the conditions that it does not meet."""
    noise = next((result.pooled for result in found.results if result.arm == UNFUSED), found.again.pooled)
    lines = []
    for result in found.results:
        judged = conditions(result, noise)
        lines.append(f"{result.arm}: {verdict(judged)}")
        others = [condition for condition in judged if condition.state != "met"]
        lines += [fill(f"    {condition}", WIDTH, subsequent_indent=" " * 8) for condition in others]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
