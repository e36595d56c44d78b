"""Model directories without weights, and random adapters and program inputs of the right shapes and magnitudes."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...graphs.config import LlamaConfig
from ...runtime.text.token_bytes import letters
from ..options.models import LLAMA_8B

if TYPE_CHECKING:
    import torch

    from ...compiler.cost.bytes_and_flops import Assumptions
    from ...compiler.program.program import Program


TINY = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def write_random_adapter(
    directory: Path, config: Mapping[str, Any], rank: int, seed: int, use_dora: bool = False
) -> str:
    """Write an adapter of `rank` and alpha 2 * rank in bfloat16 and PEFT's format on all projections and experts.

    With `use_dora` projections have magnitudes, too. Returns the directory; `config` has the fields of the base model's
    config.json.
    """
    import torch
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, deviation: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=source) * deviation).to(torch.bfloat16)

    base, tensors = LlamaConfig.from_dict(config), {}
    modules = base.stored_modules()
    for module in modules:
        outputs, inputs = base.stored_shape(module)
        tensors[f"base_model.model.{module}.lora_A.weight"] = draw(rank, inputs, inputs**-0.5)
        tensors[f"base_model.model.{module}.lora_B.weight"] = draw(outputs, rank, 0.1 * rank**-0.5)
        if use_dora:
            tensors[f"base_model.model.{module}.lora_magnitude_vector"] = torch.rand(outputs, generator=source) + 0.5
    hidden, inner = base.hidden_size, base.expert_intermediate_size
    for layer in filter(base.is_sparse, range(base.num_hidden_layers)):  # PEFT nests its wrappers of two parameters
        names = (f"base_model.model.model.layers.{layer}.mlp.experts{inside}" for inside in (".base_layer", ""))
        for name, outputs, inputs in zip(names, (2 * inner, hidden), (hidden, inner), strict=True):
            columns = rank * base.num_experts
            tensors[f"{name}.lora_A.weight"] = draw(columns, inputs, inputs**-0.5)
            tensors[f"{name}.lora_B.weight"] = draw(outputs, columns, 0.1 * rank**-0.5)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "use_dora": use_dora,
    }
    if base.num_experts:
        fields |= {"target_parameters": list(EXPERT_PARAMETERS), "peft_version": "0.21.2"}
    (directory / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return str(directory)


def write_random_adapters(
    directory: Path, config: Mapping[str, Any], rank: int, count: int, seed: int = 0, num_dora: int = 0
) -> dict[str, str]:
    """Write `count` random adapters below `directory`, several at a time, and return name -> path.

    The first `num_dora` are DoRA.
    """

    def write(index: int) -> tuple[str, str]:
        name = f"random-{index}"
        return name, write_random_adapter(directory / name, config, rank, seed + index, index < num_dora)

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(write, range(count)))


def write_tokenizer(file: Path, vocabulary: int) -> None:
    """Return a byte-level tokenizer.json of `vocabulary` tokens: the 256 bytes, then words of two to four letters.

    Only outputs can have the words.
    """
    alphabet = letters()
    names = {letter: byte for byte, letter in enumerate(alphabet[:vocabulary])}
    small = [letter for letter in alphabet if letter.isalpha() and letter.isascii()]
    words = ("".join(word) for length in (2, 3, 4) for word in product(small, repeat=length))
    for number in range(len(names), vocabulary):
        names[next(words)] = number
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": names, "merges": []},
    }
    file.write_text(json.dumps(content))


def write_model(directory: Path, config: Mapping[str, Any], adapters: int, rank: int) -> dict[str, str]:
    """Write the directory, and return its adapters, name -> directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    write_tokenizer(directory / "tokenizer.json", config["vocab_size"])
    return write_random_adapters(directory / "adapters", config, rank, adapters)


def random_tensors(
    program: "Program", device: "torch.device", assume: "Assumptions", known: "dict[str, torch.Tensor]", seed: int = 0
) -> "dict[str, torch.Tensor]":
    """Return a tensor for each input, weight and adapter; weights and adapters are shared through `known`.

    Inputs are those of sequences in the middle of an answer.
    """
    import torch

    source = torch.Generator(device).manual_seed(seed)
    result = {}
    for buffer in program.of_kind("input", "weight", "adapter"):
        if buffer.kind == "input" and not buffer.name.startswith("kv_"):
            result[buffer.name] = _input(program, buffer.name, buffer.shape, buffer.dtype, device, assume)
            continue
        tensor = known.get(buffer.name)
        if tensor is None or tuple(tensor.shape) != buffer.shape:
            tensor = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            if buffer.dtype == torch.float32:
                tensor.fill_(1.0 if buffer.name.startswith("key_balance") else 0.002)
            else:
                # like quantized rows of a normal distribution: smaller numbers would draw less power
                int8 = buffer.dtype == torch.int8
                spread = 36.0 if int8 else 1.0 if buffer.dtype.itemsize == 1 else 0.05
                values = torch.empty(buffer.shape, dtype=torch.bfloat16, device=device).normal_(
                    0.0, spread, generator=source
                )
                tensor.copy_(values.round_().clamp_(-127, 127) if int8 else values)
            known[buffer.name] = tensor
        result[buffer.name] = tensor
    return result


def _input(
    program: "Program",
    name: str,
    shape: tuple[int, ...],
    dtype: "torch.dtype",
    device: "torch.device",
    assume: "Assumptions",
) -> "torch.Tensor":
    import torch

    from ...ops.core.kv_layout import PAGE_SIZE

    context, bucket = assume.context_of(program), program.bucket
    count = shape[0] if shape else 1
    rows = torch.arange(count, device=device)
    blocks = 1 if bucket is None else bucket.blocks
    if name == "block_table":
        value: torch.Tensor = torch.arange(count * shape[1], device=device).view(shape) + 1
    elif name == "slot_mapping":
        last = context - 1
        value = (rows * blocks + last // PAGE_SIZE + 1) * PAGE_SIZE + last % PAGE_SIZE
    elif name == "adapter_index":
        slots = max((buffer.shape[0] for buffer in program.of_kind("adapter")), default=1)
        value = rows % max(1, assume.adapters_of(program, slots))
    else:
        value = {
            "context_lens": torch.full_like(rows, context),
            "positions": torch.full_like(rows, context - 1),
            "input_ids": rows % 251,
        }.get(name, rows)
    return value.to(dtype)
