"""Train a small mixture of experts and a dense model with as many active parameters, with the same adapters.

Both are trained on the CPU in minutes, on the same rows in the same order: the standard library's sources and questions
of `tasks`. The adapters of the mixture are on attention, on experts and, for one, on the router.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ..train.adapter_training import ALL_LINEAR, ATTENTION, adapted, save_adapter, save_base
from .train import ADAPTER_RATE, BASE_RATE, Batches, fit
from .train_data import BOS, EOS, Job, RowPool, Rows, split_jobs, tokenizer_texts, train_tokenizer

MODELS = ("mixture", "dense")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = "mlp.gate.weight"
ADAPTERS: dict[str, list[str]] = {"sorting": EXPERTS, "strings": [*EXPERTS, ROUTER]}
"""Adapter -> its `target_parameters` in the mixture."""
RANK, ALPHA = 8, 16
BASE_NAME = "sidestream-mixture"


@dataclass(frozen=True)
class Plan:
    """Sizes of the models and amounts of training; a step has `rows` rows of `width` tokens."""

    hidden: int = 256
    layers: int = 3
    experts: int = 16
    chosen: int = 4
    vocabulary: int = 1024
    documents: int = 1500
    width: int = 256
    rows: int = 8
    steps: int = 400
    adapter_steps: int = 40


SMOKE = Plan(128, 2, 4, 2, 320, 24, 96, 2, 3, 2)


def model_config(plan: Plan, name: str, vocabulary: int) -> Qwen3Config | Qwen3MoeConfig:
    """Return the config of a model of MODELS: the chosen experts are together as wide as the dense MLP."""
    width = 2 * plan.hidden
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": plan.hidden,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.hidden // 64,
        "num_key_value_heads": plan.hidden // 128,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "intermediate_size": width,
    }
    if name == "dense":
        return Qwen3Config(**common)
    return Qwen3MoeConfig(
        **common,
        num_experts=plan.experts,
        num_experts_per_tok=plan.chosen,
        moe_intermediate_size=width // plan.chosen,
        norm_topk_prob=True,
        output_router_logits=True,  # `fit` adds the loss that balances the experts
        router_aux_loss_coef=0.01,
    )


def train_models(plan: Plan, output: Path, seed: int) -> None:
    """Write output/NAME/{base,adapters/ADAPTER} for each name of MODELS."""
    pool = RowPool(1)
    try:
        tokenizer = train_tokenizer(plan.vocabulary, tokenizer_texts(min(plan.documents, 300), seed))
        pool.use(tokenizer)
        count, tokens = plan.rows * plan.steps, plan.width + 1
        jobs = split_jobs("mixed", count // 2, 256, seed, tokens)
        jobs += [Job("corpus", plan.documents, 0, tokens)] * max(1, round(count / 2 / plan.documents))
        base = pool.submit(jobs)()
        chosen = plan.rows * plan.adapter_steps * 4
        adapters = {name: pool.submit(split_jobs("task", chosen, 256, seed + 20, tokens, name))() for name in ADAPTERS}
    finally:
        pool.close()
    for name in MODELS:
        _train_model(plan, name, tokenizer, base, adapters, output / name, seed)


def _train_model(
    plan: Plan, name: str, tokenizer: Tokenizer, base: Rows, adapters: dict[str, Rows], output: Path, seed: int
) -> None:
    torch.manual_seed(seed)
    config = model_config(plan, name, tokenizer.get_vocab_size())
    made = Qwen3MoeForCausalLM(config) if name == "mixture" else Qwen3ForCausalLM(config)
    model: Any = made
    sizes = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {sizes / 1e6:.1f} M parameters", flush=True)
    _fit(model, _batches(base, plan.rows, plan.width, seed), BASE_RATE, plan.steps, f"{name}: base")
    config.output_router_logits = False
    save_base(model, tokenizer, output / "base")
    model = type(made).from_pretrained(output / "base", dtype=torch.float32)
    for adapter, parameters in ADAPTERS.items():
        torch.manual_seed(seed)
        on_mixture = {"target_modules": ATTENTION, "target_parameters": parameters}
        targets = on_mixture if name == "mixture" else {"target_modules": ALL_LINEAR}
        trained = adapted(model, {"r": RANK, "lora_alpha": ALPHA, **targets})
        rows = _batches(adapters[adapter], 4 * plan.rows, None, seed)
        _fit(trained, rows, ADAPTER_RATE, plan.adapter_steps, f"{name}: adapter {adapter}")
        save_adapter(trained, output / "adapters" / adapter, BASE_NAME)
        trained.unload()
        model = type(made).from_pretrained(output / "base", dtype=torch.float32)


def _batches(rows: Rows, count: int, width: int | None, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return Batches(rows, torch.device("cpu"), seed).endless(count, width)


def _fit(
    model: Any, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], highest: float, steps: int, label: str
) -> None:
    """Train the parameters that require gradients; the rate warms up and falls to zero over the last half."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=highest, betas=(0.9, 0.95), weight_decay=0.05)

    def rate(step: int) -> float:
        return highest * min(1.0, (step + 1) / max(1, steps / 20), (steps - step) / (steps / 2))

    fit(model, batches, optimizer, rate, steps, label)
