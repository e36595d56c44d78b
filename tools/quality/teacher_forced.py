"""Documents through two engines at once: the logits of every position are compared on the device, step by step, and
never kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...runtime.worker.calibrate.reader import Document, Piece

# what a document's token has to predict: text, an answer's tokens and its end, or what a task has drawn at random
# (operands, letters, names, codes), where the likeliest token is a coin toss between equals and agreement on it says
# nothing
TEXT, ANSWER, DRAWN = range(3)
KINDS = ("text", "answers", "drawn")


@dataclass(frozen=True)
class Compared:
    """Per token of all documents (CPU tensors [tokens]): KL(reference || arm) in nats, whether both rank the same token
    first, -log p of the token that follows in either (NaN after the last), the document's index, and what is to be
    predicted (an index of KINDS)."""

    kl: torch.Tensor
    same_top: torch.Tensor
    reference_nll: torch.Tensor
    arm_nll: torch.Tensor
    document: torch.Tensor
    kind: torch.Tensor


class Reader(Protocol):
    """What documents are read through: an engine, or something that it is compared with."""

    device: torch.device

    def logits(self, step: Sequence[Piece], documents: Sequence[Document]) -> torch.Tensor:
        """[tokens of the step, vocabulary]."""


@torch.no_grad()
def compare(
    reference: Reader,
    arm: Reader,
    documents: Sequence[Document],
    steps: Sequence[list[Piece]],
    progress: Callable[[int], None] = lambda tokens: None,
) -> Compared:
    """Both engines over all steps. `progress` is told each step's tokens."""
    parts: list[tuple[torch.Tensor, ...]] = []
    for step in steps:
        targets = torch.tensor(
            [token for piece in step for token in _following(documents[piece.document].tokens, piece)],
            device=reference.device,
        )
        parts.append(_compared(reference.logits(step, documents), arm.logits(step, documents), targets))
        progress(sum(piece.count for piece in step))
    owners = torch.tensor([piece.document for step in steps for piece in step for _ in range(piece.count)])
    kinds = b"".join(_kinds(documents[piece.document], piece) for step in steps for piece in step)
    kl, same, mine, other = (torch.cat([part[place] for part in parts]).cpu() for place in range(4))
    return Compared(kl, same, mine, other, owners, torch.tensor(list(kinds), dtype=torch.uint8))


def _kinds(document: Document, piece: Piece) -> bytes:
    return document.kinds[piece.start : piece.start + piece.count] if document.kinds else bytes([TEXT]) * piece.count


def _compared(reference: torch.Tensor, arm: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    p, q = torch.log_softmax(reference.float(), -1), torch.log_softmax(arm.float(), -1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    known = targets >= 0
    at = targets.clamp_min(0)[:, None]
    nll = [torch.where(known, -values.gather(1, at)[:, 0], torch.nan) for values in (p, q)]
    return kl, p.argmax(-1) == q.argmax(-1), *nll


def _following(tokens: Sequence[int], piece: Piece) -> list[int]:
    """The token after each of a piece's; -1 after the document's last."""
    following = list(tokens[piece.start + 1 : piece.start + piece.count + 1])
    return following + [-1] * (piece.count - len(following))
