"""Runs the arms over a suite, each next to a bf16 engine; on a GPU several at once, since a small model keeps it busy
only in part.
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ...graphs.checkpoint import checkpoint_config
from ...graphs.config import LlamaConfig
from ...ops.core.kv_layout import PAGE_SIZE
from ...runtime.worker.calibrate.reader import Document, Scorer, plan, step_sizes
from .arms import BY_NAME, DEFAULT, REFERENCE, WHOLE, Arm, open_arm
from .corpus import documents as library_documents
from .divergence import Divergence, divergences
from .exact import accuracies, ask, needles
from .suite import Suite, by_text, interleaved
from .teacher_forced import compare
from .verdict import ArmResult, judge

AGAIN = "bf16 again"
CACHE_BYTES = 3 << 30  # of the KV cache of an engine on a GPU, in 16 bits
GPU_SEQUENCES, CPU_SEQUENCES = 256, 32
SLOW_QUESTIONS, SLOW_DOCUMENTS, SLOW_NEEDLES = 4, 2, 1
PART_QUESTIONS, PART_DOCUMENTS, PART_NEEDLES = 500, 100, 10
CLEAN = "clean"
Progress = Callable[[str], None]


@dataclass
class Round:
    """All arms on one model: CLEAN or "injected"."""

    label: str
    again: ArmResult
    results: list[ArmResult] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether every control was caught, and every arm ran."""
        return not self.errors and not self.missed_controls

    @property
    def missed_controls(self) -> list[str]:
        """The controls that neither miss a condition of the protocol nor stand apart from the default."""
        return [
            result.arm for result in self.results if result.control and not result.failed and not self.apart(result)
        ]

    def apart(self, result: ArmResult) -> str:
        """Where an arm is clearly farther from bf16 than the default is: its mean KL lies above, and the intervals
        do not meet. "" where nowhere.
        """
        default = {
            one.adapter: one.mean_kl for other in self.results if other.arm == DEFAULT for one in other.divergences
        }
        found = [
            one for one in result.divergences if one.adapter in default and one.mean_kl[1] > default[one.adapter][2]
        ]
        worst = max(found, key=lambda one: one.mean_kl[0] / max(default[one.adapter][0], 1e-12), default=None)
        return (
            ""
            if worst is None
            else f"mean KL of {worst.mean_kl[0]:.2e} against the default's {default[worst.adapter][0]:.2e} "
            f"({worst.adapter})"
        )


@dataclass(frozen=True)
class Model:
    """What is served: a directory, its adapters, and for the arms that need them the calibration and, by the arm's
    name, rounded weights.

    `whole`: the arms that are asked everything.
    """

    directory: Path
    adapters: Mapping[str, Path]
    calibration: Any = None
    whole: Sequence[str] = WHOLE
    rounded: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Raw:
    """What an engine said: answers to the questions and needles asked, and the figures of what it read."""

    answers: list[str]
    needle_answers: list[str]
    divergences: list[Divergence]
    seconds: float


class Examiner:
    """Runs arms in this process; a bf16 engine stays next to them, whose logits theirs are compared with."""

    def __init__(self, model: Model, suite: Suite, device: str | None) -> None:
        self.model, self.suite = model, suite
        config = checkpoint_config(model.directory)
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        longest = max(suite.longest, PAGE_SIZE)
        self.shape = step_sizes(
            config.vocab_size, max((len(document.tokens) for document in suite.documents), default=1), on_cpu
        )
        self.sizes: dict[str, Any] = dict(_engine_sizes(config, longest, self.shape[2], on_cpu))
        self.sizes |= {
            "device": device,
            "max_model_len": min(longest, config.max_position_embeddings),
            "max_loras": len(model.adapters),
        }
        self._reference: Scorer | None = None

    @property
    def reference(self) -> Scorer:
        """bf16's logits."""
        if self._reference is None:
            self._reference = Scorer(self._open(BY_NAME[REFERENCE]).model, *self.shape)
        return self._reference

    def run(self, name: str, progress: Progress) -> Raw:
        """Everything about one arm.

        `AGAIN` is bf16 at another load: half as many sequences at once, in another order, documents at other sizes.
        """
        begin, arm = time.perf_counter(), BY_NAME[REFERENCE if name == AGAIN else name]
        suite = part_for(arm, self.suite, self.model.whole)
        progress(f"{name}: start")
        llm = self._open(arm, halved=name == AGAIN)
        order = int(name == AGAIN)  # with the same order all arms have the same batches
        progress(f"{name}: questions")
        answers = ask(llm, suite.questions, interleaved(suite.questions, order))
        progress(f"{name}: needles")
        needle_answers = ask(llm, suite.needles, by_text(suite.needles, order))
        progress(f"{name}: documents")
        found: list[Divergence] = []
        if suite.documents and name != REFERENCE:
            tokens, *others = self.shape
            scorer = Scorer(llm.model, tokens + tokens // 2 * order, *others)
            steps = list(plan([len(document.tokens) for document in suite.documents], *self.shape[:3]))
            found = divergences(compare(self.reference, scorer, suite.documents, steps), suite.documents)
        return Raw(answers, needle_answers, found, time.perf_counter() - begin)

    def _open(self, arm: Arm, halved: bool = False) -> Any:
        sequences = {"max_num_seqs": max(1, self.sizes["max_num_seqs"] // 2)} if halved else {}
        model = self.model
        return open_arm(
            arm,
            model.directory,
            model.adapters,
            model.calibration,
            model.rounded.get(arm.name),
            **{**self.sizes, **sequences},
        )


def part_for(arm: Arm, suite: Suite, whole: Sequence[str] = WHOLE) -> Suite:
    """What an arm is asked: everything if a claim rests on it; else a part; if it is slow, little."""
    adapters = {question.adapter for question in suite.questions} | {document.adapter for document in suite.documents}
    if arm.slow:
        return suite.only(adapters, SLOW_QUESTIONS, SLOW_DOCUMENTS, SLOW_NEEDLES)
    if arm.name in whole:
        return suite
    return suite.only(adapters, PART_QUESTIONS, PART_DOCUMENTS, PART_NEEDLES)


def evaluate(
    model: Model, suite: Suite, arms: Sequence[Arm], device: str | None, label: str, progress: Progress, jobs: int = 1
) -> Round:
    """All arms on one model, `jobs` of them at once in processes of their own.

    What goes wrong in one arm is noted, and the others run.
    """
    names = [REFERENCE, AGAIN, *(arm.name for arm in arms)]
    raw: dict[str, Raw] = {}
    errors: dict[str, str] = {}
    for name, found in (
        _at_once(model, suite, device, names, progress, jobs)
        if jobs > 1
        else _in_turn(model, suite, device, names, progress)
    ):
        if isinstance(found, str):
            errors[name] = found
        else:
            raw[name] = found
    if REFERENCE not in raw or AGAIN not in raw:
        raise RuntimeError(f"bf16 itself did not run: {errors.get(REFERENCE) or errors.get(AGAIN)}")
    again = _result(BY_NAME[REFERENCE], suite, raw[AGAIN], raw[REFERENCE])
    again.arm, again.about = AGAIN, "bf16 at another load: half as many sequences at once, in another order"
    result = Round(label, again, errors=errors)
    for arm in arms:
        if arm.name in raw:
            result.results.append(_result(arm, suite, raw[arm.name], raw[REFERENCE], model.whole))
    judge(result.results, again.pooled)
    return result


def _result(arm: Arm, suite: Suite, raw: Raw, reference: Raw, whole: Sequence[str] = WHOLE) -> ArmResult:
    part = part_for(arm, suite, whole)
    result = ArmResult(arm.name, arm.about, arm.control, raw.divergences, seconds=raw.seconds)
    result.accuracies, result.pooled = accuracies(
        part.questions, _of_part(suite.questions, reference.answers, part.questions), raw.answers
    )
    result.needles = needles(
        part.needles, _of_part(suite.needles, reference.needle_answers, part.needles), raw.needle_answers
    )
    return result


def _in_turn(
    model: Model, suite: Suite, device: str | None, names: Sequence[str], progress: Progress
) -> Iterator[tuple[str, Raw | str]]:
    examiner = Examiner(model, suite, device)
    for name in names:
        yield name, _tried(examiner, name, progress)


def _at_once(
    model: Model, suite: Suite, device: str | None, names: Sequence[str], progress: Progress, jobs: int
) -> Iterator[tuple[str, Raw | str]]:
    """Lanes with one process each, dealt to the GPUs in turn: a process that ends takes the arm that it ran with it,
    and no other.
    """
    lane, pools = threading.local(), list[ProcessPoolExecutor]()
    lanes = min(jobs, len(names))
    threads = max((os.cpu_count() or 1) // lanes, 1)
    gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), 0 if device == "cpu" else torch.cuda.device_count())

    def examine(name: str) -> Raw | str:
        if getattr(lane, "pool", None) is None:
            lane.gpu = getattr(lane, "gpu", None) or next(gpus)
            lane.pool = ProcessPoolExecutor(1, get_context("spawn"), _begin, (model, suite, device, threads, lane.gpu))
            pools.append(lane.pool)
        try:
            found: Raw | str = lane.pool.submit(_examine, name).result()
        except BrokenProcessPool as problem:
            lane.pool = None
            found = f"its process ended: {problem}"
        return found

    def longest_first(name: str) -> int:
        arm = BY_NAME[REFERENCE if name == AGAIN else name]
        return 0 if arm.slow else 1 if arm.name in model.whole else 2

    try:
        with ThreadPoolExecutor(lanes) as runners:
            waiting = {runners.submit(examine, name): name for name in sorted(names, key=longest_first)}
            for future in as_completed(waiting):
                found = future.result()
                progress(f"{waiting[future]}: {'did not run' if isinstance(found, str) else f'{found.seconds:.0f} s'}")
                yield waiting[future], found
    finally:
        for pool in pools:
            pool.shutdown()


def visible_gpus(chosen: str | None, count: int) -> Iterator[str]:
    """What CUDA_VISIBLE_DEVICES is for one process after the other: each of the `count` GPUs in turn, by the names
    that `chosen` has for them.
    """
    names = chosen.split(",")[:count] if chosen else [str(index) for index in range(count)]
    return cycle(names or [chosen or ""])


_EXAMINER: list[Examiner] = []  # of a process of the pool


def _begin(model: Model, suite: Suite, device: str | None, threads: int, gpu: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # in front of whatever looks for a GPU
    torch.set_num_threads(threads)  # several processes share the cores
    _EXAMINER.append(Examiner(model, suite, device))


def _examine(name: str) -> Raw | str:
    return _tried(_EXAMINER[0], name, lambda stage: None)


def _tried(examiner: Examiner, name: str, progress: Progress) -> Raw | str:
    try:
        with torch.no_grad():
            return examiner.run(name, progress)
    except Exception as problem:  # whatever it is: the other arms' figures must not be lost
        return f"{type(problem).__name__}: {' '.join(str(problem).split())[:400]}"
    finally:
        _forget()


def stages(arms: int, jobs: int) -> int:
    """How often `progress` is called for so many arms (one that fails calls it less)."""
    return (arms + 2) * (1 if jobs > 1 else 4)


def calibrate_model(
    directory: Path, adapters: Mapping[str, Path], texts: Sequence[Sequence[int]], device: str | None
) -> Any:
    """The model's calibration on some texts, as `sidestream calibrate` makes it."""
    from argparse import Namespace

    from ...graphs.checkpoint import Checkpoint
    from ...runtime.engine.resolve import resolve_device
    from ...runtime.quantization.calibration import fingerprint
    from ...runtime.quantization.figures import calibrate
    from ..options.models import load_model

    chosen = resolve_device(device)
    options = Namespace(
        model=str(directory),
        lora_modules=[(name, str(path)) for name, path in adapters.items()],
        max_loras=None,
        max_lora_rank=None,
        lora_target_modules=None,
    )
    model = load_model(options, directory, torch.bfloat16).to(chosen)
    jobs = [(list(text), slot) for slot in range(-1, len(adapters)) for text in (texts if slot < 0 else texts[:2])]
    return calibrate(
        model, jobs, chosen, fingerprint(model.config, Checkpoint(directory, model.config)), list(adapters)
    )


def round_model(
    arm: Arm,
    directory: Path,
    adapters: Mapping[str, Path],
    calibration: Any,
    texts: Sequence[Sequence[int]],
    device: str | None,
    output: Path,
) -> Path:
    """Write the weights of an arm as `sidestream calibrate --round` rounds them with its options."""
    from ...runtime.worker.calibrate.rounding import round_weights

    own = {"calibration": arm.smoothed(calibration)} if arm.calibrated else {}
    read = [Document(text) for text in texts] + [Document(text, name) for name in adapters for text in texts[:2]]
    round_weights(directory, adapters, read, {**arm.options, **own, "device": device}, output)
    return output


def other_texts(encode: Callable[[str], Sequence[int]], count: int, longest: int = 512) -> list[list[int]]:
    """Beginnings of documents of the library that no arm is measured with."""
    return [list(encode(text)[:longest]) for text in library_documents("train", count)]


def calibration_texts(documents: Sequence[Document], count: int = 8, longest: int = 512) -> list[list[int]]:
    """Beginnings of the first documents that the base model reads."""
    chosen = [
        list(document.tokens[:longest])
        for document in documents
        if document.adapter is None and len(document.tokens) > 1
    ]
    return chosen[:count] or [list(document.tokens[:longest]) for document in documents[:count]]


def _engine_sizes(config: LlamaConfig, longest: int, pages: int, on_cpu: bool) -> dict[str, int]:
    sequences = CPU_SEQUENCES if on_cpu else GPU_SEQUENCES
    blocks = -(-longest // PAGE_SIZE)
    page_bytes = config.num_hidden_layers * config.num_key_value_heads * 2 * PAGE_SIZE * config.head_dim * 2
    wanted = min(sequences * blocks, max(CACHE_BYTES // page_bytes, blocks))
    return {"max_num_seqs": sequences, "num_kv_pages": max(wanted, pages, blocks)}


def _of_part(all_questions: Sequence[Any], answers: Sequence[str], part: Sequence[Any]) -> list[str]:
    if len(part) == len(all_questions):
        return list(answers)
    known = {id(question): answer for question, answer in zip(all_questions, answers, strict=True)}
    return [known[id(question)] for question in part]


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
