"""Run the arms of the real model, each next to transformers in fp32."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ....graphs.checkpoint import checkpoint_config
from ....ops.core.kv_layout import PAGE_SIZE
from ....runtime.worker.calibrate.scorer import Document, Scorer, plan, step_sizes
from ..arms import BY_NAME, Arm, open_arm
from ..divergence import Divergence, divergences
from ..evaluate import round_model
from ..processes import run_arms
from ..teacher_forced import compare
from .reference import Reference


class ArmFigures(msgspec.Struct, frozen=True):
    """Figures of one arm for the base model and each adapter; `problem` is the reason if there are none."""

    arm: str
    about: str
    divergences: list[Divergence]
    seconds: float = 0.0
    problem: str = ""


class Findings(msgspec.Struct, frozen=True):
    """All figures, with the machine, the releases and the texts.

    tokens   read by the base model, and by each adapter
    texts    sha256 of all token ids
    """

    model: str
    adapters: list[str]
    device: str
    versions: dict[str, str]
    tokens: int
    documents: int
    texts: str
    seconds: float
    arms: list[ArmFigures]


class Examiner:
    """Runs arms in one process, which keeps the reference."""

    def __init__(
        self,
        directory: Path,
        adapters: Mapping[str, Path],
        documents: Sequence[Document],
        device: str | None,
        calibration: Any,
        texts: Sequence[Sequence[int]],
    ) -> None:
        self.directory, self.adapters, self.documents, self.device = directory, adapters, documents, device
        self.calibration, self.texts = calibration, texts
        self.reference = Reference(directory, adapters, device)

    def __call__(self, name: str) -> ArmFigures:
        """Return the figures of an arm."""
        begin, arm = time.perf_counter(), BY_NAME[name]
        longest = max(len(document.tokens) for document in self.documents)
        vocabulary = checkpoint_config(self.directory).vocab_size
        tokens, sequences, pages, blocks = step_sizes(vocabulary, longest, self.reference.device.type == "cpu")
        sizes = {
            "device": self.device,
            "max_model_len": max(longest, PAGE_SIZE),
            "max_num_seqs": 8,
            "num_kv_pages": pages,
            "max_loras": len(self.adapters),
        }
        steps = list(plan([len(document.tokens) for document in self.documents], tokens, sequences, pages))
        with TemporaryDirectory(prefix="sidestream_rounded_") as place:
            rounded = None
            if arm.rounded:
                output = Path(place) / "rounded.safetensors"
                subject = arm, self.directory, self.adapters, self.calibration
                rounded = round_model(*subject, self.texts, self.device, output)
            llm = open_arm(arm, self.directory, self.adapters, self.calibration, rounded, **sizes)
            scorer = Scorer(llm.model, tokens, sequences, pages, blocks)
            compared = compare(self.reference, scorer, self.documents, steps)
        seconds = round(time.perf_counter() - begin, 1)
        return ArmFigures(arm.name, arm.about, divergences(compared, self.documents), seconds)


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
) -> list[ArmFigures]:
    """Return one result for each arm in their order; an arm that fails is noted, and the others run.

    texts   token ids to round weights with
    jobs    arms at once, in processes of their own
    """
    asked = directory, adapters, documents, device, calibration, texts
    found: dict[str, ArmFigures] = {}
    for name, result in run_arms([arm.name for arm in arms], Examiner, asked, device, jobs):
        if isinstance(result, str):
            result = ArmFigures(name, BY_NAME[name].about, [], problem=result)
        found[name] = result
        progress(f"{name}: {result.problem or one_line(result.divergences)}")
    return [found[arm.name] for arm in arms]


def one_line(found: Sequence[Divergence]) -> str:
    """Return the figures of the base model and of each adapter."""
    return "; ".join(
        f"{one.adapter} KL {one.mean_kl[0]:.4f}, top-1 {one.top_1[0]:.2%}, perplexity {one.perplexity_ratio[0]:.4f}"
        for one in found
    )
