"""Read documents through two engines at once, and compare the logits of every token on the device, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...runtime.worker.calibrate.scorer import Chunk, Document

# what a token predicts: text, an answer, or what a task draws at random, where equally likely tokens tie
TEXT, ANSWER, DRAWN = range(3)


@dataclass(frozen=True)
class Compared:
    """Figures of each token of all documents, CPU tensors [tokens].

    kl                      KL(reference || arm) in nats
    same_top                whether both rank the same token first
    reference_nll, arm_nll  -log p of the next token; NaN after the last
    document                index of the document
    kind                    TEXT, ANSWER or DRAWN
    """

    kl: torch.Tensor
    same_top: torch.Tensor
    reference_nll: torch.Tensor
    arm_nll: torch.Tensor
    document: torch.Tensor
    kind: torch.Tensor


class Reader(Protocol):
    """Returns the logits of documents."""

    device: torch.device

    def logits(self, step: Sequence[Chunk], documents: Sequence[Document]) -> torch.Tensor:
        """Return [tokens of the step, vocabulary]."""


@torch.no_grad()
def compare(reference: Reader, arm: Reader, documents: Sequence[Document], steps: Sequence[list[Chunk]]) -> Compared:
    """Run both readers over all steps."""
    parts: list[tuple[torch.Tensor, ...]] = []
    for step in steps:
        targets = [token for piece in step for token in _next_tokens(documents[piece.document].tokens, piece)]
        logits = reference.logits(step, documents), arm.logits(step, documents)
        parts.append(_compared(*logits, torch.tensor(targets, device=reference.device)))
    owners = torch.tensor([piece.document for step in steps for piece in step for _ in range(piece.count)])
    kinds = b"".join(_kinds(documents[piece.document], piece) for step in steps for piece in step)
    kl, same, theirs, ours = (torch.cat([part[column] for part in parts]).cpu() for column in range(4))
    return Compared(kl, same, theirs, ours, owners, torch.tensor(list(kinds), dtype=torch.uint8))


def _kinds(document: Document, piece: Chunk) -> bytes:
    return document.kinds[piece.start : piece.start + piece.count] if document.kinds else bytes([TEXT]) * piece.count


def _compared(reference: torch.Tensor, arm: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    p, q = torch.log_softmax(reference.float(), -1), torch.log_softmax(arm.float(), -1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    known = targets >= 0
    column = targets.clamp_min(0)[:, None]
    nll = [torch.where(known, -values.gather(1, column)[:, 0], torch.nan) for values in (p, q)]
    return kl, p.argmax(-1) == q.argmax(-1), *nll


def _next_tokens(tokens: Sequence[int], piece: Chunk) -> list[int]:
    """Return the token after each of a piece's; -1 after the document's last."""
    following = list(tokens[piece.start + 1 : piece.start + piece.count + 1])
    return following + [-1] * (piece.count - len(following))
