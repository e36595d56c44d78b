"""Run `sidestream eval --real`."""

import argparse
import hashlib
import json
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from ...options.engine import add_value
from .convert_gguf import MISSING_EXTRA, real_model

CALIBRATION_TEXTS, CPU_CALIBRATION_TEXTS = 8, 2
ROUNDING_TEXTS, CPU_ROUNDING_TEXTS = 256, 4
GPU_JOBS = 4


def add_options(group: Any) -> None:
    """Add the flags for the real model."""
    group.add_argument(
        "--real",
        nargs="?",
        const="",
        metavar="PATH",
        help="measure SmolLM2-135M-Instruct, fetched or in PATH (GGUF file, or converted directory)",
    )
    add_value(group, "--tokens", 20480, "with --real: tokens for the base model and for each adapter")


def run(options: argparse.Namespace) -> int:
    """Fetch, convert and train what is missing, measure, print the tables, write the JSON; 1: an arm did not run.

    Raises ValueError if the extra is not installed or the model is not available.
    """
    begin = time.perf_counter()
    try:
        import peft  # noqa: F401
        import transformers
    except ImportError as missing:
        raise ValueError(f"eval --real {MISSING_EXTRA} ({missing.name} is not installed)") from missing
    import torch

    from .... import __version__
    from ....runtime.quantization.defaults import LENGTH, ROUND_TOKENS
    from ....runtime.quantization.texts import documents as pieces
    from ....runtime.quantization.texts import standard_text
    from ....runtime.text.tokenizer import load_tokenizer
    from ..arms import chosen_arms
    from ..evaluate import Model, calibrate_model
    from .adapters import train_adapters
    from .measure import Findings, measure
    from .report import report
    from .texts import natural_documents

    arms = chosen_arms([name.strip() for name in options.arms.split(",") if name.strip()])
    on_gpu = options.device != "cpu" and torch.cuda.is_available()

    def progress(stage: str) -> None:
        print(f"{time.perf_counter() - begin:7.1f} s  {stage}", file=sys.stderr, flush=True)

    directory = real_model(options.real or None)
    progress(f"the model is in {directory}")
    if options.adapters is not None:
        adapters = {path.parent.name: path.parent for path in sorted(options.adapters.glob("*/adapter_config.json"))}
    elif on_gpu:
        adapters = train_adapters(directory, directory / "adapters", torch.device("cuda"))
    else:
        adapters = {}
        progress("adapters are trained on a GPU only; load trained ones with --adapters DIR")
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(f"{directory} has no tokenizer; convert the model again")
    documents = natural_documents(tokenizer.encode, options.tokens, (None, *adapters))
    count, most = (CALIBRATION_TEXTS, ROUNDING_TEXTS) if on_gpu else (CPU_CALIBRATION_TEXTS, CPU_ROUNDING_TEXTS)
    read = tokenizer.encode(standard_text())[: min(most * LENGTH, ROUND_TOKENS)]  # as `sidestream calibrate` reads
    texts = [piece for piece, _ in pieces(read, LENGTH, 0)]
    calibration = None
    if any(arm.calibrated for arm in arms):
        progress("calibration")
        calibration = calibrate_model(directory, adapters, texts[:count], options.device)
    jobs = options.jobs or (GPU_JOBS if on_gpu else 1)
    model = Model(directory, adapters, calibration, texts)
    found = measure(model, documents, arms, options.device, progress, jobs)
    base = [document for document in documents if document.adapter is None]
    findings = Findings(
        directory.name.rpartition("-")[0] or directory.name,
        list(adapters),
        torch.cuda.get_device_name() if on_gpu else "a CPU, reference ops",
        {"sidestream": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__},
        sum(len(document.tokens) for document in base),
        len(base),
        _digest([document.tokens for document in base]),
        round(time.perf_counter() - begin, 1),
        found,
    )
    print(report(findings))
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(msgspec.to_builtins(findings), indent=1) + "\n", encoding="utf-8")
    return 1 if any(each.problem for each in found) else 0


def _digest(texts: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for ids in texts:
        digest.update(array("i", [len(ids), *ids]).tobytes())
    return digest.hexdigest()
