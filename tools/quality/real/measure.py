"""The arms of the real model, each read next to transformers in fp32."""

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import torch

from ....graphs.checkpoint import checkpoint_config
from ....ops.core.kv_layout import PAGE_SIZE
from ....runtime.worker.calibrate.reader import Document, Scorer, plan, step_sizes
from ..arms import BY_NAME, REFERENCE, UNFUSED, Arm, open_arm
from ..divergence import Divergence, divergences
from ..evaluate import round_model
from ..teacher_forced import compare
from .reference import Reference

ARMS = (
    REFERENCE,
    UNFUSED,
    "int8",
    "int8-auto",
    "int8-auto-logits-bf16",
    "int8-auto-residual-bf16",
    "int8-calibrated",
    "int8-rounded",
    "int8-calibrated-rounded",
    "int8-calibrated-rounded-values",
    "int8-calibrated-rounded-lm-head-bf16",
    "int8-calibrated-norms-smoothed",
    "int8-calibrated-not-smoothed",
    "int8-rotated-8",
    "int8-not-rotated",
    "int8-lm-head-bf16",
    "int8-kv-bf16",
    "int8-lora-bf16",
    "fp8",
    "fp8-rounded",
    "peer-int8",
    "peer-fp8-rowwise",
    "peer-fp8",
)


class Measured(msgspec.Struct, frozen=True):
    """One arm: its figures for the base model and for each adapter; `problem`: why there are none."""

    arm: str
    about: str
    divergences: list[Divergence]
    seconds: float = 0.0
    problem: str = ""


class Findings(msgspec.Struct, frozen=True):
    """All that was measured, with the machine, the releases and the texts that it was measured with.

    tokens   that the base model read, and each adapter
    texts    the sha256 of all token ids: equal on two machines whose texts are
    """

    model: str
    adapters: list[str]
    device: str
    versions: dict[str, str]
    tokens: int
    documents: int
    texts: str
    seconds: float
    arms: list[Measured]


def real_arms(names: Sequence[str]) -> list[Arm]:
    """The arms to run: `names`, or all of ARMS. Raises ValueError for a name that is no arm."""
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"--arms names {unknown[0]!r}, which is no arm; arms: {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in (names or ARMS)]


def measure(
    directory: Path,
    adapters: Mapping[str, Path],
    documents: Sequence[Document],
    arms: Sequence[Arm],
    device: str | None,
    calibration: Any,
    texts: Sequence[Sequence[int]],
    progress: Callable[[str], None],
    jobs: int = 1,
) -> list[Measured]:
    """One result for each arm, in the order of `arms`; `texts`: what weights are rounded by; `jobs`: arms at once, in
    processes of their own. What goes wrong in one arm is noted, and the others run.
    """
    asked = Asked(directory, adapters, documents, device, calibration, texts)
    if min(jobs, len(arms)) > 1:
        return _at_once(asked, arms, min(jobs, len(arms)), progress)
    return _in_turn(asked, arms, progress)


class Asked(NamedTuple):
    """What all arms share, as `measure` takes it."""

    directory: Path
    adapters: Mapping[str, Path]
    documents: Sequence[Document]
    device: str | None
    calibration: Any
    texts: Sequence[Sequence[int]]


def _at_once(asked: Asked, arms: Sequence[Arm], jobs: int, progress: Callable[[str], None]) -> list[Measured]:
    found: dict[str, Measured] = {}
    threads = max((os.cpu_count() or 1) // jobs, 1)  # the processes share the cores
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        running = {pool.submit(_named, asked, arm.name): arm for arm in arms}
        for future in as_completed(running):
            arm = running[future]
            try:
                found[arm.name] = future.result()
            except BrokenProcessPool as problem:
                found[arm.name] = Measured(arm.name, arm.about, [], problem=f"a process of the arms ended: {problem}")
            progress(_said(found[arm.name]))
    return [found[arm.name] for arm in arms]


def _named(asked: Asked, name: str) -> Measured:
    """One arm, by its name: an `Arm` holds what cannot be sent to a process."""
    return _in_turn(asked, [BY_NAME[name]], lambda stage: None)[0]


def _in_turn(asked: Asked, arms: Sequence[Arm], progress: Callable[[str], None]) -> list[Measured]:
    directory, adapters, documents, device, calibration, texts = asked
    reference = Reference(directory, adapters, device)
    config = checkpoint_config(directory)
    longest = max(len(document.tokens) for document in documents)
    tokens, sequences, pages, blocks = step_sizes(config.vocab_size, longest, reference.device.type == "cpu")
    sizes = {
        "device": device,
        "max_model_len": max(longest, PAGE_SIZE),
        "max_num_seqs": 8,
        "num_kv_pages": pages,
        "max_loras": len(adapters),
    }
    steps = list(plan([len(document.tokens) for document in documents], tokens, sequences, pages))
    found = []
    for arm in arms:
        begin = time.perf_counter()
        try:
            with torch.no_grad(), TemporaryDirectory(prefix="sidestream_rounded_") as place:
                rounded = None
                if arm.rounded:
                    output = Path(place) / "rounded.safetensors"
                    rounded = round_model(arm, directory, adapters, calibration, texts, device, output)
                llm = open_arm(arm, directory, adapters, calibration, rounded, **sizes)
                scorer = Scorer(llm.model, tokens, sequences, pages, blocks)
                compared = compare(reference, scorer, documents, steps)
            result = Measured(
                arm.name, arm.about, divergences(compared, documents), round(time.perf_counter() - begin, 1)
            )
            del llm, scorer, compared
        except Exception as problem:  # whatever it is: the other arms' figures must not be lost
            said = f"{type(problem).__name__}: {' '.join(str(problem).split())[:400]}"
            result = Measured(arm.name, arm.about, [], round(time.perf_counter() - begin, 1), said)
        found.append(result)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        progress(_said(result))
    return found


def _said(result: Measured) -> str:
    return f"{result.arm}: {result.problem or one_line(result.divergences)}"


def one_line(found: Sequence[Divergence]) -> str:
    """The base model's figures and those of the worst adapter."""
    return "; ".join(
        f"{one.adapter} KL {one.mean_kl[0]:.4f}, top-1 {one.top_1[0]:.2%}, perplexity {one.perplexity_ratio[0]:.4f}"
        for one in found
    )
