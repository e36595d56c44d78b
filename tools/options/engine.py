"""The options that every command shares, spelled as vLLM's users know them, and how they become arguments of `LLM`
and `CompileOptions`.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from ...runtime.demo_model import DEMO_MODEL, demo_adapters


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def share(text: str) -> float:
    """A number in (0, 1], for argparse."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value


def layers(text: str) -> bool | tuple[int, ...]:
    """`on`, `off`, or numbers of layers such as 0,3-7, for argparse."""
    if text in ("on", "off"):
        return text == "on"
    chosen: set[int] = set()
    for part in text.split(","):
        if not re.fullmatch(r"\d{1,4}(-\d{1,4})?", part):
            raise argparse.ArgumentTypeError(f"{text!r} is not on, off, or numbers of layers such as 0,3-7")
        first, _, last = part.partition("-")
        chosen |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(chosen))


DEFAULT_PRECISION = "int8"  # that of compiler.options, which would take torch to read


def named_path(text: str) -> tuple[str, str]:
    """`name=path` of --lora-modules, for argparse."""
    name, equals, path = text.partition("=")
    if not equals or not path or not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=DIRECTORY (a name has letters, digits, '.', '_' and '-'), such as "
            "pirate=adapters/pirate"
        )
    return name, path


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, which may be left out."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model directory in the Hugging Face format (default: the demo model with its adapters)",
    )


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """What is compiled, and how."""
    group = parser.add_argument_group("compiler")
    group.add_argument(
        "--precision",
        choices=("int8", "fp8", "bf16", "fp32"),
        default=DEFAULT_PRECISION,
        help="int8 and fp8 quantize weights, activations and KV cache; bf16 and fp32 nothing (default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8", "fp8_e4m3", "int8", "bf16"),
        default="auto",
        help="what the KV cache holds (default: as --precision says)",
    )
    group.add_argument("--no-hadamard", action="store_true", help="the same as --hadamard off")
    group.add_argument(
        "--hadamard",
        type=layers,
        metavar="LAYERS",
        help="where Q and K are rotated before K is quantized: on, off, or layers such as 0,3-7 (default: as "
        "calibrated, else on)",
    )
    group.add_argument(
        "--center-keys",
        type=layers,
        metavar="LAYERS",
        help="where a calibrated constant is subtracted from K before it is quantized: on, off, or layers (default: "
        "as calibrated, else off)",
    )
    group.add_argument(
        "--balance-keys",
        type=layers,
        metavar="LAYERS",
        help="where K and Q are brought to one size: on, off, or layers (default: on)",
    )
    group.add_argument(
        "--rotate-values",
        type=layers,
        metavar="LAYERS",
        help="where V is rotated by its weights: on, off, or layers (default: off)",
    )
    group.add_argument(
        "--lora-dtype",
        choices=("auto", "bf16", "int8", "fp8"),
        help="what adapters are kept in on the device: 16 bits, or eight as --precision has them (default: int8 with "
        "--precision int8, else bf16)",
    )
    group.add_argument(
        "--disable-pass",
        action="append",
        default=[],
        metavar="PASS",
        help="leave a compiler pass out by its name, as `sidestream dump` lists them; may be repeated",
    )


def add_lora_options(parser: argparse.ArgumentParser) -> None:
    """Adapters and their limits."""
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        type=named_path,
        metavar="NAME=DIR",
        help="PEFT adapters to load",
    )
    group.add_argument(
        "--max-loras",
        type=positive,
        metavar="N",
        help="adapters that one batch may mix (default: as many as are loaded, at most 8)",
    )
    group.add_argument(
        "--max-lora-rank",
        type=positive,
        metavar="R",
        help="highest rank that is accepted (default: that of the loaded adapters)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """All that `LLM` takes."""
    add_compile_options(parser)
    add_lora_options(parser)
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-model-len",
        type=positive,
        metavar="N",
        help="longest prompt + answer, in tokens (default: the model's limit, at most 8192)",
    )
    group.add_argument(
        "--calibration",
        metavar="FILE",
        help="what `sidestream calibrate` wrote (default: sidestream_calibration.safetensors in the model's "
        "directory, if it is there)",
    )
    group.add_argument(
        "--max-num-seqs", type=positive, metavar="N", help="requests that run at once (default: 256, on a CPU 16)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        metavar="N",
        help="tokens of one step; longer prompts are cut into chunks",
    )
    group.add_argument(
        "--gpu-memory-utilization", type=share, metavar="SHARE", help="share of the GPU's memory to use (default: 0.9)"
    )
    group.add_argument("--enforce-eager", action="store_true", help="run step by step instead of replaying CUDA graphs")
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    group.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")


def model_directory(options: argparse.Namespace) -> Path:
    """The directory of MODEL, or of the demo model.

    Raises ValueError when it is no model directory.
    """
    directory = Path(options.model) if options.model else DEMO_MODEL
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} is no model directory: it has no config.json; name one in the Hugging Face format, or "
            "leave MODEL out for the demo model"
        )
    return directory


def adapters_of(options: argparse.Namespace) -> dict[str, str]:
    """The adapters by name: those of --lora-modules, or the demo model's own when MODEL is left out."""
    chosen = dict(options.lora_modules)
    if len(chosen) < len(options.lora_modules):
        raise ValueError("--lora-modules names an adapter twice; give each its own name")
    if not options.model:
        chosen = {name: str(path) for name, path in demo_adapters().items()} | chosen
    for name, path in chosen.items():
        if not (Path(path) / "adapter_config.json").is_file():
            raise ValueError(
                f"adapter {name!r}: {path} has no adapter_config.json; name a directory that PEFT's save_pretrained "
                "wrote"
            )
    return chosen


def compile_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `CompileOptions`."""
    kv_dtype = "fp8_e4m3" if options.kv_cache_dtype == "fp8" else options.kv_cache_dtype
    return {
        "precision": options.precision,
        "kv_dtype": kv_dtype,
        "disable": tuple(options.disable_pass),
    } | key_arguments(options)


def precision_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The same as arguments of `LLM`, which decides about Hadamard and centring by itself where they are not given."""
    compiled = compile_arguments(options)
    arguments = {
        "precision": compiled["precision"],
        "kv_cache_dtype": compiled["kv_dtype"],
        "disable_passes": compiled["disable"],
    }
    return arguments | key_arguments(options)


def key_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Those of --hadamard, --center-keys, --balance-keys, --rotate-values and --lora-dtype that were given."""
    return ({"hadamard": False} if options.no_hadamard else {}) | given(
        options, "hadamard", "center_keys", "balance_keys", "rotate_values", "lora_dtype"
    )


def llm_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `LLM`; options that were not given keep its defaults."""
    arguments = precision_arguments(options)
    arguments |= {
        "model": str(model_directory(options)),
        "adapters": adapters_of(options),
        "enforce_eager": options.enforce_eager,
        "seed": options.seed,
    }
    return arguments | given(
        options,
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_loras",
        "max_lora_rank",
        "gpu_memory_utilization",
        "device",
        "calibration",
    )


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of `names` that have a value."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def demo_prompts() -> list[dict[str, str | None]]:
    """The demo's batch: {"adapter", "prompt", "answer"} each; the adapter is None for the base model."""
    return json.loads((DEMO_MODEL / "prompts.json").read_text())
