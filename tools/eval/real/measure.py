"""Run the arms of the real model, each next to transformers in fp32."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ....graphs.checkpoint import checkpoint_config
from ....ops.core.kv_layout import PAGE_SIZE
from ....runtime.worker.calibrate.scorer import Chunk, Document, Scorer, plan, step_sizes
from ..arms import BY_NAME, Arm
from ..divergence import Divergence, divergences
from ..evaluate import Model, open_rounded
from ..processes import run_arms
from ..teacher_forced import compare

KEPT_ELEMENTS = 1 << 28  # logits kept for the next arm: 1 GiB


class Reference:
    """A `teacher_forced.Reader` of transformers' model in fp32, with each adapter as peft applies it.

    It uses no code of this package.
    """

    def __init__(self, directory: Path, adapters: Mapping[str, Path], device: str | None) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(chosen)
        model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
        for name, path in adapters.items():
            if isinstance(model, PeftModel):
                model.load_adapter(str(path), adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, str(path), adapter_name=name)
        self.model = model.float().to(self.device).eval()
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()

    def logits(self, step: Sequence[Chunk], documents: Sequence[Document]) -> torch.Tensor:
        """Return fp32 [tokens of the step, vocabulary]."""
        parts = [
            self._of(piece.document, documents)[piece.start : piece.start + piece.count].to(self.device)
            for piece in step
        ]
        return torch.cat(parts)

    def _of(self, place: int, documents: Sequence[Document]) -> torch.Tensor:
        """Return [tokens, vocabulary] of a document."""
        if place not in self._kept:
            self._kept[place] = self._run(documents[place])
            size = self._kept[place].numel()
            while len(self._kept) > 1 and sum(each.numel() for each in self._kept.values()) > KEPT_ELEMENTS + size:
                self._kept.popitem(last=False)
        return self._kept[place]

    @torch.no_grad()
    def _run(self, document: Document) -> torch.Tensor:
        ids = torch.tensor([list(document.tokens)], device=self.device)
        if document.adapter is not None:
            self.model.set_adapter(document.adapter)
        elif hasattr(self.model, "disable_adapter"):
            with self.model.disable_adapter():
                return self.model(input_ids=ids, use_cache=False).logits[0]
        return self.model(input_ids=ids, use_cache=False).logits[0]


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

    def __init__(self, model: Model, documents: Sequence[Document], device: str | None) -> None:
        self.model, self.documents, self.device = model, documents, device
        self.reference = Reference(model.directory, model.adapters, device)

    def __call__(self, name: str) -> ArmFigures:
        """Return the figures of an arm."""
        begin, arm = time.perf_counter(), BY_NAME[name]
        longest = max(len(document.tokens) for document in self.documents)
        vocabulary = checkpoint_config(self.model.directory).vocab_size
        tokens, sequences, pages, blocks = step_sizes(vocabulary, longest, self.reference.device.type == "cpu")
        sizes = {
            "device": self.device,
            "max_model_len": max(longest, PAGE_SIZE),
            "max_num_seqs": 8,
            "num_kv_pages": pages,
            "max_loras": len(self.model.adapters),
        }
        steps = list(plan([len(document.tokens) for document in self.documents], tokens, sequences, pages))
        llm = open_rounded(arm, self.model, **sizes)
        scorer = Scorer(llm.model, tokens, sequences, pages, blocks)
        compared = compare(self.reference, scorer, self.documents, steps)
        seconds = round(time.perf_counter() - begin, 1)
        return ArmFigures(arm.name, arm.about, divergences(compared, self.documents), seconds)


def measure(
    model: Model,
    documents: Sequence[Document],
    arms: Sequence[Arm],
    device: str | None,
    progress: Callable[[str], None],
    jobs: int = 1,
) -> list[ArmFigures]:
    """Return one result for each arm in their order; an arm that fails is noted, and the others run.

    jobs    arms at once, in processes of their own
    """
    found: dict[str, ArmFigures] = {}
    for name, result in run_arms([arm.name for arm in arms], Examiner, (model, documents, device), device, jobs):
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
