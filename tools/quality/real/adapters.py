"""Trains three adapters on the real model: `python -m sidestream.tools.quality.real.adapters MODEL -o DIR`.

Their shapes are those that users' adapters have: a small rsLoRA on all projections, one of rank 16 on attention, one of
rank 32 with other ranks and scales for some projections. Each learns one of the evaluation's tasks, the question in the
model's own chat template. Needs the `train` extra; on an H200 it takes a minute, on a CPU give fewer --steps and
--rows.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..adapter_training import ALL_LINEAR, ATTENTION, AdapterRecipe, get_peft_model, save_adapter
from ..tasks import TASKS
from ..train import fit
from .checkpoint import NAME

ADAPTERS = {
    "strings": AdapterRecipe(8, 16, ALL_LINEAR, rslora=True),
    "sorting": AdapterRecipe(16, 32, ATTENTION),
    "json": AdapterRecipe(
        32, 32, ALL_LINEAR, rank_pattern={"q_proj": 16, "down_proj": 8}, alpha_pattern={"down_proj": 16}
    ),
}
STEPS, ROWS, RATE = 300, 32, 5e-4
SEED = 0


def rows(name: str, tokenizer: Any, count: int) -> list[tuple[list[int], int]]:
    """(token ids, how many of them are the question) of `count` questions of a task with their answers."""
    made = []
    for item in TASKS[name].items(count, SEED, "train"):
        asked = [{"role": "user", "content": item.prompt}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        question = tokenizer(text, add_special_tokens=False).input_ids
        answer = tokenizer(item.answer, add_special_tokens=False).input_ids
        made.append(([*question, *answer, tokenizer.eos_token_id], len(question)))
    return made


def batches(
    examples: Sequence[tuple[list[int], int]], size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches for `fit`: ids and loss weights [rows, tokens], the question with weight 0."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        chosen = [examples[place] for place in torch.randint(len(examples), (size,), generator=generator).tolist()]
        width = max(len(ids) for ids, _ in chosen)
        ids, weights = torch.zeros(size, width, dtype=torch.long), torch.zeros(size, width)
        for row, (tokens, asked) in enumerate(chosen):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            weights[row, asked : len(tokens)] = 1.0
        yield ids.to(device), weights.to(device)


def train_adapters(
    directory: Path,
    output: Path,
    device: torch.device,
    steps: int = STEPS,
    size: int = ROWS,
    names: Sequence[str] = tuple(ADAPTERS),
) -> dict[str, Path]:
    """Train and write the adapters `names`, `size` questions a step; those that are there already stay. Returns their
    directories by name.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    written = {name: output / name for name in names}
    for name in names:
        recipe = ADAPTERS[name]
        if (written[name] / "adapter_config.json").is_file():
            continue
        torch.manual_seed(SEED)
        base: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).to(device)
        model: Any = get_peft_model(base, recipe.config())
        model.train()
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=RATE)

        def rate(step: int) -> float:
            return RATE * min(1.0, (step + 1) / 20, (steps - step) / (steps / 2))

        examples = batches(rows(name, tokenizer, min(4000, steps * size)), size, device)
        fit(model, examples, optimizer, rate, steps, f"adapter {name}")
        save_adapter(model, written[name], NAME)
    return written


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m sidestream.tools.quality.real.adapters`."""
    parser = argparse.ArgumentParser(
        prog="python -m sidestream.tools.quality.real.adapters", description="Train three adapters on the real model."
    )
    parser.add_argument("model", type=Path, help="the converted model's directory")
    parser.add_argument("-o", "--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each adapter (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="questions of a step (default: %(default)s)")
    parser.add_argument(
        "--only", choices=ADAPTERS, help="one of them: several processes then train at the same time (default: all)"
    )
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = (options.only,) if options.only else tuple(ADAPTERS)
    train_adapters(options.model, options.output, device, max(options.steps, 2), max(options.rows, 1), names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
