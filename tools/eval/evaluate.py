"""Run the arms over a suite, each next to a bf16 engine."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...graphs.checkpoint import checkpoint_config
from ...graphs.config import LlamaConfig
from ...ops.core.kv_layout import PAGE_SIZE
from ...runtime.worker.calibrate.scorer import Document, Scorer, plan, step_sizes
from .answers import Accuracy, accuracies, ask
from .arms import BY_NAME, REFERENCE, Arm, open_arm
from .corpus import documents as library_documents
from .divergence import Divergence, divergences
from .processes import run_arms
from .suite import Suite, shuffled
from .teacher_forced import compare

AGAIN = "bf16 again"
CACHE_BYTES = 3 << 30  # of the KV cache of an engine on a GPU, in 16 bits
GPU_SEQUENCES, CPU_SEQUENCES = 256, 32
CALIBRATION_TEXTS, ROUNDING_TEXTS = 8, 8  # of at most TEXT_TOKENS tokens
TEXT_TOKENS = 512
Progress = Callable[[str], None]


@dataclass
class ArmResult:
    """Figures of one arm: of its documents, and of its answers by adapter or group and pooled."""

    arm: str
    about: str
    divergences: list[Divergence] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)
    pooled: Accuracy | None = None
    seconds: float = 0.0


@dataclass
class Evaluation:
    """Results of all arms; `again` is bf16 at another load, `errors` why arms did not run, by name."""

    again: ArmResult
    results: list[ArmResult] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A model directory and its adapters, with the calibration and the texts for the arms that need them."""

    directory: Path
    adapters: Mapping[str, Path]
    calibration: Any = None
    rounding_texts: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Run:
    """Answers and divergences of one engine."""

    answers: list[str]
    divergences: list[Divergence]
    seconds: float


class Examiner:
    """Runs arms in one process, and keeps a bf16 engine to compare logits with."""

    def __init__(self, model: Model, suite: Suite, device: str | None) -> None:
        self.model, self.suite = model, suite
        config = checkpoint_config(model.directory)
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        longest = max(suite.longest, PAGE_SIZE)
        longest_document = max((len(document.tokens) for document in suite.documents), default=1)
        self.shape = step_sizes(config.vocab_size, longest_document, on_cpu)
        self.sizes: dict[str, Any] = {
            **_engine_sizes(config, longest, self.shape[2], on_cpu),
            "device": device,
            "max_model_len": min(longest, config.max_position_embeddings),
            "max_loras": len(model.adapters),
        }
        self._reference: Scorer | None = None

    @property
    def reference(self) -> Scorer:
        """Return the bf16 engine's logits."""
        if self._reference is None:
            self._reference = Scorer(self._open(BY_NAME[REFERENCE]).model, *self.shape)
        return self._reference

    def __call__(self, name: str) -> Run:
        """Ask and read everything.

        `AGAIN` is bf16 with half as many sequences at once, in another order, and with documents cut elsewhere.
        """
        begin, again = time.perf_counter(), int(name == AGAIN)
        llm = self._open(BY_NAME[REFERENCE if again else name], halved=bool(again))
        answers = ask(llm, self.suite.questions, shuffled(len(self.suite.questions), again))
        found: list[Divergence] = []
        if self.suite.documents and name != REFERENCE:
            tokens, *others = self.shape
            scorer = Scorer(llm.model, tokens + tokens // 2 * again, *others)
            steps = list(plan([len(document.tokens) for document in self.suite.documents], *self.shape[:3]))
            found = divergences(compare(self.reference, scorer, self.suite.documents, steps), self.suite.documents)
        return Run(answers, found, time.perf_counter() - begin)

    def _open(self, arm: Arm, halved: bool = False) -> Any:
        sizes = dict(self.sizes)
        if halved:
            sizes["max_num_seqs"] = max(1, sizes["max_num_seqs"] // 2)
        return open_rounded(arm, self.model, **sizes)


def evaluate(
    model: Model, suite: Suite, arms: Sequence[Arm], device: str | None, progress: Progress, jobs: int = 1
) -> Evaluation:
    """Run all arms on one model, `jobs` of them at once; an arm that fails is noted, and the others run.

    Raises RuntimeError when bf16 itself fails.
    """
    names = [REFERENCE, AGAIN, *(arm.name for arm in arms if arm.name != REFERENCE)]
    runs: dict[str, Run] = {}
    errors: dict[str, str] = {}
    for name, found in run_arms(names, Examiner, (model, suite, device), device, jobs):
        if isinstance(found, str):
            errors[name] = found
        else:
            runs[name] = found
        progress(f"{name}: {'did not run' if name in errors else f'{found.seconds:.0f} s'}")
    if REFERENCE not in runs or AGAIN not in runs:
        raise RuntimeError(f"bf16 itself did not run: {errors.get(REFERENCE) or errors.get(AGAIN)}")

    def result(name: str, about: str) -> ArmResult:
        run = runs[name]
        each, pooled = accuracies(suite.questions, runs[REFERENCE].answers, run.answers)
        return ArmResult(name, about, run.divergences, each, pooled, run.seconds)

    again = result(AGAIN, "bf16 at another load: half as many sequences at once, in another order")
    results = [result(arm.name, arm.about) for arm in arms if arm.name in runs and arm.name != REFERENCE]
    return Evaluation(again, results, errors)


def calibrate_model(
    directory: Path, adapters: Mapping[str, Path], texts: Sequence[Sequence[int]], device: str | None
) -> Any:
    """Calibrate the model on some texts, as `sidestream calibrate` does."""
    from argparse import Namespace

    from ...graphs.checkpoint import Checkpoint
    from ...runtime.engine.resolve import resolve_device
    from ...runtime.quantization.calibration import fingerprint
    from ...runtime.quantization.model_statistics import calibrate
    from ..options.models import load_model

    chosen = resolve_device(device)
    options = Namespace(
        model=str(directory),
        lora_modules=[(name, str(path)) for name, path in adapters.items()],
        max_loras=None,
        max_lora_rank=None,
        max_expert_rank=None,
        lora_target_modules=None,
        lora_parts=None,
        lora_lenient=False,
    )
    model = load_model(options, directory, torch.bfloat16).to(chosen)
    jobs = [(list(text), slot) for slot in range(-1, len(adapters)) for text in (texts if slot < 0 else texts[:2])]
    checkpoint = Checkpoint(directory, model.config)
    return calibrate(model, jobs, chosen, fingerprint(model.config, checkpoint), list(adapters))


def open_rounded(arm: Arm, model: Model, **sizes: Any) -> Any:
    """Return an `LLM` of an arm, with the weights that `sidestream calibrate --round` writes if the arm uses them."""
    from ...runtime.worker.calibrate.rounding import round_weights

    with tempfile.TemporaryDirectory(prefix="sidestream_rounded_") as place:
        output = Path(place) / "rounded.safetensors"
        if arm.rounded:
            texts, own = model.rounding_texts, {"calibration": model.calibration} if arm.calibrated else {}
            documents = [Document(text) for text in texts]
            documents += [Document(text, name) for name in model.adapters for text in texts[:2]]
            options = {**arm.options, **own, "device": sizes["device"]}
            round_weights(model.directory, model.adapters, documents, options, output)
        return open_arm(arm, model.directory, model.adapters, model.calibration, output, **sizes)


def rounding_texts(encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Return beginnings of training documents of the standard library, which no arm is measured with."""
    return [list(encode(text)[:TEXT_TOKENS]) for text in library_documents("train", ROUNDING_TEXTS)]


def calibration_texts(documents: Sequence[Document]) -> list[list[int]]:
    """Return beginnings of the first documents that the base model reads."""
    of_base = [document for document in documents if document.adapter is None and len(document.tokens) > 1]
    return [list(document.tokens[:TEXT_TOKENS]) for document in (of_base or documents)[:CALIBRATION_TEXTS]]


def _engine_sizes(config: LlamaConfig, longest: int, pages: int, on_cpu: bool) -> dict[str, int]:
    sequences = CPU_SEQUENCES if on_cpu else GPU_SEQUENCES
    blocks = -(-longest // PAGE_SIZE)
    page_bytes = config.num_hidden_layers * config.num_key_value_heads * 2 * PAGE_SIZE * config.head_dim * 2
    wanted = min(sequences * blocks, max(CACHE_BYTES // page_bytes, blocks))
    return {"max_num_seqs": sequences, "num_kv_pages": max(wanted, pages, blocks)}
