"""Accuracy and perplexity of the evaluation models in transformers, for the report of the training."""

from collections import defaultdict
from typing import Any

import torch
from tokenizers import Tokenizer

from ...eval.corpus import documents
from .tasks import TASKS, right
from .train_data import EOS, FULL, Rows

EXAM_SEED = 1
TOKENS_IN_A_BATCH = 65_536
LONGEST_PADDED = 6144  # longer prompts run alone: the size of their mask is quadratic


@torch.no_grad()
def answers(model: Any, tokenizer: Tokenizer, prompts: list[str], new_tokens: int) -> list[str]:
    """Return greedy completions, batched by length and padded on the left."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(prompts)]
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    device = next(model.parameters()).device
    found = [""] * len(prompts)
    while order:
        width = len(encoded[order[-1]])
        rows = max(1, min(len(order), TOKENS_IN_A_BATCH // width)) if width <= LONGEST_PADDED else 1
        chosen, order = order[-rows:], order[:-rows]
        ids = torch.full((rows, width), EOS)
        mask = torch.zeros(rows, width, dtype=torch.long)
        for row, index in enumerate(chosen):
            ids[row, width - len(encoded[index]) :] = torch.tensor(encoded[index])
            mask[row, width - len(encoded[index]) :] = 1
        given = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=EOS,
        )
        for index, text in zip(chosen, tokenizer.decode_batch(given[:, width:].tolist()), strict=True):
            found[index] = text
    return found


def accuracy(model: Any, tokenizer: Tokenizer, name: str, count: int, instructed: bool = False) -> dict[str, Any]:
    """Return the share of right answers to `count` test items, and by level.

    A fifth as many items of each level that is only trained help to choose `test_levels`. `instructed` asks in the base
    model's words, at the levels of the test only.
    """
    task = TASKS[name]
    asked = task.levelled(count, EXAM_SEED, "test", task.test_levels)
    others = () if instructed else tuple(level for level in task.train_levels if level not in task.test_levels)
    if others:
        asked = asked + task.levelled(max(1, count // 5) * len(others), EXAM_SEED, "test", others)
    prompts = [(task.instructed(item) if instructed else item).prompt for _, item in asked]
    by_level: dict[int, list[bool]] = defaultdict(list)
    for (level, item), text in zip(asked, answers(model, tokenizer, prompts, task.max_new_tokens), strict=True):
        by_level[level].append(right(item, text))
    tested = [value for level in set(task.test_levels) for value in by_level.get(level, ())]
    levels = {level: sum(values) / len(values) for level, values in sorted(by_level.items())}
    return {"right": sum(tested) / len(tested), "items": len(tested), "levels": levels}


@torch.no_grad()
def needle_accuracy(model: Any, needles: Rows) -> float:
    """Return the share of found needles: rows with every token of the answer (weight FULL) the likeliest one."""
    device, start, found = next(model.parameters()).device, 0, 0
    for length in needles.lengths.tolist():
        answer = int((needles.weights[start : start + length] == FULL).sum())
        ids = torch.from_numpy(needles.ids[start : start + length].astype("int64"))[None].to(device)
        logits = model(input_ids=ids[:, :-1], logits_to_keep=answer, use_cache=False).logits
        found += int((logits[0].argmax(-1) == ids[0, -answer:]).all())
        start += length
    return found / len(needles.lengths)


@torch.no_grad()
def perplexity(model: Any, tokenizer: Tokenizer, limit: int) -> float:
    """Return the perplexity of held-out documents of the standard library."""
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    for text in documents("held_out", limit):
        ids = torch.tensor([tokenizer.encode(text).ids], device=device)
        logits = model(input_ids=ids[:, :-1]).logits[0].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
    return float(torch.tensor(total / tokens).exp())
