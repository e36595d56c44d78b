"""Models, adapters, buckets and batches that commands measure or compare."""

import argparse
import difflib
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...runtime.engine.options import target_modules
from .engine import adapters_of, add_model, add_value, model_directory
from .shapes import OTHER_SHAPES

if TYPE_CHECKING:
    from ...compiler.cost.hardware import Gpu

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
LLAMA_70B: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SHAPES = {"llama-3.1-8b": LLAMA_8B, "llama-3.1-70b": LLAMA_70B, **OTHER_SHAPES}
DEFAULT_BUCKETS = ("decode:8", "mixed:256")
CONTEXT_BLOCKS = 8
MIXED_SEQUENCES = 8

LORA_CHOICES = ("none", "zipf", "four")
T = TypeVar("T", str, int)


def pick_adapters(kind: str, names: Sequence[T], count: int, seed: int) -> Sequence[T | None]:
    """Return the adapter of each of `count` requests. `kind`: see `LORA_CHOICES`."""
    if kind == "none":
        return [None] * count
    if kind == "four":
        return [names[index % min(4, len(names))] for index in range(count)]
    return zipf(names, count, seed)


def zipf(names: Sequence[T], count: int, seed: int = 0) -> list[T]:
    """Return `count` random names with p(k) ~ 1/k."""
    return random.Random(seed).choices(names, weights=[1 / rank for rank in range(1, len(names) + 1)], k=count)


def bucket(text: str) -> tuple[str, int]:
    """Parse `decode:N` (or just `N`), `cascade:N`, `verify1:N`, `verify3:N`, `verify7:N` or `mixed:N`."""
    match = re.fullmatch(r"(?:(decode|cascade|verify[137]|mixed):)?([1-9]\d{0,4})", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of decode:SEQUENCES, cascade:SEQUENCES, verify3:SEQUENCES (3 drafts each; also 1 and 7) "
            "and mixed:TOKENS, such as decode:8 or mixed:256"
        )
    return match[1] or "decode", int(match[2])


def as_bucket(kind: str, count: int, lora: bool) -> Any:
    """Return the compiler's bucket for `decode:count`, `cascade:count`, `verify3:count` or `mixed:count`."""
    from ...compiler.program.program import Bucket

    rows = 1 + int(kind.removeprefix("verify")) if kind.startswith("verify") else 1
    sequences = min(count, MIXED_SEQUENCES) if kind == "mixed" else count
    return Bucket(
        tokens=count * rows,
        sequences=sequences,
        pages=sequences * CONTEXT_BLOCKS + 1,
        blocks=CONTEXT_BLOCKS,
        decode=kind in ("decode", "cascade"),
        lora=lora,
        rows=rows,
        cascade=kind == "cascade",
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add --shape: a model given by its config only."""
    parser.add_argument("--shape", metavar="NAME|FILE", help=f"instead of MODEL: {', '.join(SHAPES)}, or a config.json")


def add_bench_model(parser: argparse.ArgumentParser) -> None:
    """Add the optional MODEL of a bench, and --shape."""
    add_model(parser, "a directory, or `demo` (default: Llama-3.1-8B's shape with random weights)")
    add_shape(parser)


def add_random_adapters(group: Any) -> None:
    """Add a bench's random adapters, and how requests choose one."""
    group.add_argument(
        "--lora",
        nargs="+",
        choices=LORA_CHOICES,
        default=["none", "zipf"],
        help="adapters of the requests (default: none zipf)",
    )
    add_value(group, "--num-adapters", 8, "random adapters")
    add_value(group, "--lora-rank", 32, "their rank; alpha is twice as much", metavar="R")


def add_buckets(parser: argparse.ArgumentParser, about: str) -> None:
    """Add --bucket: the programs of a dump."""
    parser.add_argument(
        "--bucket",
        nargs="+",
        type=bucket,
        default=[bucket(text) for text in DEFAULT_BUCKETS],
        metavar="KIND:N",
        help=f"{about} (default: {' '.join(DEFAULT_BUCKETS)})",
    )


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """Add --gpu: the GPU of the estimated times."""
    parser.add_argument(
        "--gpu", metavar="NAME", help="estimate for an H200 or H100 (default: this machine's GPU, or an H200)"
    )


def gpu_for(options: argparse.Namespace) -> "Gpu":
    """Return the figures of the GPU of --gpu, or of the default. Raises UnknownGpu (a ValueError)."""
    from ...compiler.cost.hardware import gpu_here, gpu_named

    return gpu_named(options.gpu) if options.gpu else gpu_here()


def check_one_model(options: argparse.Namespace) -> None:
    """Raise ValueError if both MODEL and --shape are given."""
    if options.shape and options.model:
        raise ValueError("MODEL and --shape name two models; give one")


def model_config(options: argparse.Namespace) -> Any:
    """Return the config of MODEL or of --shape. Raises ValueError or ConfigError."""
    from ...graphs.checkpoint import checkpoint_config
    from ...graphs.config import LlamaConfig

    check_one_model(options)
    if options.shape:
        options.model = options.shape  # not the demo model, so without its adapters
        return LlamaConfig.from_dict(shape_fields(options.shape))
    return checkpoint_config(model_directory(options))


def shape_fields(shape: str) -> dict[str, Any]:
    """Return config.json's fields for --shape: a name of SHAPES, a config.json, or its directory.

    Raises ValueError.
    """
    if shape in SHAPES:
        return SHAPES[shape]
    path = Path(shape)
    if (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file() and path.suffix == ".json":
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--shape {shape} is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"--shape {shape} holds no JSON object; name a model's config.json")
        return fields
    near = difflib.get_close_matches(shape, SHAPES, 1)
    raise ValueError(
        f"--shape {shape} is neither a name ({', '.join(SHAPES)}) nor a config.json"
        + (f"; did you mean {near[0]}?" if near else "; name one of them")
    )


def lora_shape(options: argparse.Namespace, config: Any) -> Any:
    """Return the shape of stacks for the named adapters, or for --max-loras of --max-lora-rank; None without either."""
    from ...graphs.adapter import load_adapter
    from ...graphs.lora import RANK_MULTIPLE
    from ...graphs.lora_stacks import lora_shape_for
    from ...runtime.adapters.adapter_limits import max_rank, model_targets

    base = None if getattr(options, "shape", None) else model_directory(options)
    adapters = [
        load_adapter(path, config, max_rank(config, options.max_lora_rank), options.lora_lenient, base=base)
        for path in adapters_of(options).values()
    ]
    targets = model_targets(config, target_modules(options.lora_target_modules), bool(adapters))
    slots, rank = options.max_loras or len(adapters), options.max_lora_rank
    if not slots:
        if options.max_lora_rank:
            raise ValueError(
                "--max-lora-rank without adapters: add --max-loras N, or name adapters with --lora-modules NAME=DIR"
            )
        return None
    rank = rank or (None if adapters else RANK_MULTIPLE)
    return lora_shape_for(adapters, slots, rank, targets, options.lora_parts, options.max_expert_rank)


def load_model(options: argparse.Namespace, directory: Path, dtype: Any) -> Any:
    """Return the plain Llama on the CPU with the checkpoint's weights and adapter i in slot i. `dtype` None: fp32."""
    import torch

    from ...graphs.adapter import load_adapter
    from ...graphs.checkpoint import Checkpoint, checkpoint_config, load_weights
    from ...graphs.llama import Llama
    from ...graphs.lora_stacks import fill_slot, resolved, slot_tensors
    from ...runtime.adapters.adapter_limits import max_rank
    from ...runtime.worker.cpu_threads import limit_cpu_threads

    limit_cpu_threads(torch.device("cpu"))
    config = checkpoint_config(directory)
    lora, dtype = lora_shape(options, config), dtype or torch.float32
    checkpoint = Checkpoint(directory, config)
    model = Llama(config, lora, dtype)
    checkpoint.validate(model.checkpoint_tensors(), config.tie_word_embeddings)
    load_weights(model, checkpoint)
    for slot, path in enumerate(adapters_of(options).values()):
        if lora is not None:
            rank = max_rank(config, options.max_lora_rank)
            adapter = load_adapter(path, config, rank, options.lora_lenient, base=directory)
            fill_slot(model, slot, slot_tensors(resolved(adapter, checkpoint.tensor), config, lora, dtype))
    return model


def reference_logits(model: Any, inputs: dict[str, Any]) -> Any:
    """Return logits of the model itself, uncompiled."""
    import torch

    from ...ops.core.kv_layout import kv_cache_shape

    config, pages = model.config, int(inputs["block_table"].max()) + 1
    shape = kv_cache_shape(pages, config.num_key_value_heads, config.head_dim)
    with torch.no_grad():
        return model(
            **inputs, kv_caches=[torch.zeros(shape, dtype=model.dtype) for _ in range(config.num_hidden_layers)]
        )
