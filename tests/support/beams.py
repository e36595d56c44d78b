"""Beam search of transformers."""

from typing import Any

import torch


def transformers_beams(
    model: Any, ids: list[int], width: int, tokens: int, eos: list[int] | None, length_penalty: float = 0.0
) -> list[tuple[list[int], float]]:
    """(token ids without padding, score) of each beam, best first. Without a penalty it is the log-probability."""
    found = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=tokens,
        do_sample=False,
        length_penalty=length_penalty,
        early_stopping="never",
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        ends = [place for place in range(len(ids), len(row)) if eos and row[place] in eos]
        rows.append((row[: ends[0] + 1] if ends else row, score))
    return rows
