"""Three adapters for the real model, trained on a GPU when `sidestream eval --real` runs for the first time.

Their shapes are common ones: a small rsLoRA on all projections, rank 16 on attention, and rank 32 with other ranks and
scales for some projections. Each learns one task of `tasks`, asked in the model's chat template. Training takes a
minute on an H200.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .convert_gguf import NAME
from .tasks import training_questions

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "strings": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR, "use_rslora": True},
    "sorting": {"r": 16, "lora_alpha": 32, "target_modules": ATTENTION},
    "json": {
        "r": 32,
        "lora_alpha": 32,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"q_proj": 16, "down_proj": 8},
        "alpha_pattern": {"down_proj": 16},
    },
}
"""Arguments of `peft.LoraConfig`, by adapter and task."""
STEPS, ROWS, RATE = 300, 32, 5e-4
SEED = 0


def rows(name: str, tokenizer: Any, count: int) -> list[tuple[list[int], int]]:
    """Return (token ids, length of the question) of `count` questions of a task with their answers."""
    made = []
    for prompt, text in training_questions(name, count, SEED):
        messages = [{"role": "user", "content": prompt}]
        templated = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        question = tokenizer(templated, add_special_tokens=False).input_ids
        answer = tokenizer(text, add_special_tokens=False).input_ids
        made.append(([*question, *answer, tokenizer.eos_token_id], len(question)))
    return made


def batches(
    examples: Sequence[tuple[list[int], int]], size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids int64 and loss weights fp32, both [size, tokens], without end; questions have weight 0."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        chosen = [examples[index] for index in torch.randint(len(examples), (size,), generator=generator).tolist()]
        width = max(len(ids) for ids, _ in chosen)
        ids, weights = torch.zeros(size, width, dtype=torch.long), torch.zeros(size, width)
        for row, (tokens, asked) in enumerate(chosen):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            weights[row, asked : len(tokens)] = 1.0
        yield ids.to(device), weights.to(device)


def train_adapters(
    directory: Path, output: Path, device: torch.device, steps: int = STEPS, size: int = ROWS
) -> dict[str, Path]:
    """Train all adapters with `size` questions per step, write them below `output`, and return their directories.

    Adapters that exist are kept.
    """
    from peft import LoraConfig, get_peft_model
    from tqdm import trange
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    written = {name: output / name for name in ADAPTERS}
    for name, shape in ADAPTERS.items():
        if (written[name] / "adapter_config.json").is_file():
            continue
        torch.manual_seed(SEED)
        base: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).to(device)
        model: Any = get_peft_model(base, LoraConfig(lora_dropout=0.0, task_type="CAUSAL_LM", **shape))
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE)
        examples = batches(rows(name, tokenizer, min(4000, steps * size)), size, device)
        for step in trange(steps, desc=f"adapter {name}", unit="step"):
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 20, (steps - step) / (steps / 2))
            weighted_loss(model, *next(examples))[0].backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        model.peft_config["default"].base_model_name_or_path = NAME
        model.save_pretrained(str(written[name]), save_embedding_layers=False)
    return written


def weighted_loss(model: Any, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return the mean loss of a batch, computed in bf16, and the model's outputs; both tensors are [rows, tokens]."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        outputs = model(input_ids=ids[:, :-1], use_cache=False)
    logits, wanted = outputs.logits.flatten(0, 1).float(), weights[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    return (losses * wanted.flatten()).sum() / wanted.sum(), outputs
