"""The reference of the real model: transformers and peft in fp32, without code of this package."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ....runtime.worker.calibrate.scorer import Chunk, Document

KEPT_ELEMENTS = 1 << 28  # logits kept for the next arm: 1 GiB


class Reference:
    """A `teacher_forced.Reader` of transformers' model, with each adapter as peft applies it."""

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
