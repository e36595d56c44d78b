"""LlamaConfig: what the graph needs to know from a checkpoint's config.json, as transformers 4 or 5 writes it.

Everything that would change the arithmetic and that the graph does not do is refused by name; other fields are ignored.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .regular_file import FileRefusedError, read_bounded

HEAD_DIMS = (64, 128)
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
_MAX_CONFIG_BYTES = 1 << 20
_DTYPES = ("bfloat16", "float16", "float32")


class ConfigError(ValueError):
    """A config.json that cannot be served: says which field, and what to do about it."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; `kind` is "default" (not at all), "linear" or "llama3"."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Shapes and constants of one Llama.

    Field names are those of config.json; `dtype` is the checkpoint's, as torch spells it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"head_dim {self.head_dim} is not supported: the attention kernels handle {HEAD_DIMS[0]} and "
                f"{HEAD_DIMS[1]}; use such a Llama"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}: correct config.json"
            )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "LlamaConfig":
        """Reads config.json's fields. Raises ConfigError for anything that this engine would compute differently."""
        _refuse_foreign(fields)
        heads = _integer(fields, "num_attention_heads")
        hidden = _integer(fields, "hidden_size")
        if fields.get("head_dim") is None and hidden % heads:
            raise ConfigError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}: give head_dim in config.json"
            )
        positions = _integer(fields, "max_position_embeddings", 2048)
        theta, scaling = _rope(fields, positions)
        eos = fields.get("eos_token_id")
        dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ConfigError(
                f"dtype {dtype!r} is not supported: use a checkpoint saved in one of {', '.join(_DTYPES)}"
            )
        return cls(
            vocab_size=_integer(fields, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(fields, "intermediate_size"),
            num_hidden_layers=_integer(fields, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_integer(fields, "num_key_value_heads", heads),
            head_dim=_integer(fields, "head_dim", hidden // heads),
            rms_norm_eps=_number(fields, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=positions,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            dtype=dtype,
            bos_token_id=_token_ids(fields, "bos_token_id")[0] if fields.get("bos_token_id") is not None else None,
            eos_token_ids=_token_ids(fields, "eos_token_id") if eos is not None else (),
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> "LlamaConfig":
        """Reads `directory`/config.json."""
        return cls.from_dict(
            read_json_object(
                Path(directory) / "config.json", ConfigError, "point at a directory with a Hugging Face checkpoint"
            )
        )

    def module_shape(self, module: str) -> tuple[int, int]:
        """(output, input) features of a projection, e.g. module_shape("q_proj") or its full name."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes = {
            "q_proj": (queries, self.hidden_size),
            "k_proj": (keys, self.hidden_size),
            "v_proj": (keys, self.hidden_size),
            "o_proj": (self.hidden_size, queries),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }
        return shapes[module.rpartition(".")[2]]

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of a layer's projections, in order."""
        return ATTENTION_MODULES + MLP_MODULES

    def linear_modules(self) -> list[str]:
        """Full names of every projection that may carry a LoRA adapter, layer by layer."""
        inside = [f"self_attn.{name}" for name in ATTENTION_MODULES] + [f"mlp.{name}" for name in MLP_MODULES]
        return [f"model.layers.{layer}.{name}" for layer in range(self.num_hidden_layers) for name in inside]


def read_json_object(
    path: Path,
    error: type[ValueError],
    missing_remedy: str,
    max_bytes: int = _MAX_CONFIG_BYTES,
    roots: Sequence[Path] | None = None,
    called: str | None = None,
) -> dict[str, Any]:
    """The JSON object in the regular file `path`, under one of `roots` if given; whatever is wrong with the file is
    raised as `error`, naming it (by its path, or as it is `called`) and none of its content.
    """
    name = called or path
    try:
        content = read_bounded(path, max_bytes, roots)
        value = {} if content is None else json.loads(content)
    except FileNotFoundError:
        raise error(f"{path} does not exist: {missing_remedy}") from None
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror}): check its permissions") from None
    except FileRefusedError as problem:
        raise error(f"{name} {problem}: put the file itself there") from None
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise error(f"{name} is not valid JSON: download or save it again") from None
    if content is None:
        raise error(f"{name} is larger than {max_bytes} bytes: it is not the file that it is named after")
    if not isinstance(value, dict):
        raise error(f"{name} does not hold a JSON object: download or save it again")
    return value


def _refuse_foreign(fields: Mapping[str, Any]) -> None:
    """Raises for another architecture and for variants of Llama that compute something else."""
    architectures = fields.get("architectures") or ["LlamaForCausalLM"]
    if fields.get("model_type", "llama") != "llama" or architectures != ["LlamaForCausalLM"]:
        raise ConfigError(
            f"architecture {architectures} (model_type {fields.get('model_type')!r}) is not supported: serve a "
            "LlamaForCausalLM (Llama 2, 3, 3.1, 3.2)"
        )
    for bias in ("attention_bias", "mlp_bias"):
        if fields.get(bias):
            raise ConfigError(
                f"{bias} is not supported: the projections here have no bias; use a Llama checkpoint trained without it"
            )
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(
            f"hidden_act {activation!r} is not supported: only 'silu' is; use a Llama checkpoint that was trained "
            "with it"
        )
    if fields.get("quantization_config"):
        raise ConfigError(
            "quantization_config is set: this checkpoint is already quantized; use the bf16 original, Sidestream "
            "quantizes it while loading"
        )


def _rope(fields: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling]:
    """(theta, scaling) from transformers 5's `rope_parameters` or transformers 4's `rope_theta` and `rope_scaling`."""
    source = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    table = fields.get(source) or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source} must be an object, not {table!r}: correct config.json")
    theta = (
        _number(table, "rope_theta", None)
        if table.get("rope_theta") is not None
        else _number(fields, "rope_theta", 10000.0)
    )
    kind = table.get("rope_type", table.get("type", "default"))
    if _number(table, "partial_rotary_factor", 1.0) != 1.0 or _number(fields, "partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            "partial_rotary_factor is not supported: Llama rotates whole heads; use a checkpoint without it"
        )
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", factor=_number(table, "factor", None))
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor=_number(table, "factor", None),
            low_freq_factor=_number(table, "low_freq_factor", None),
            high_freq_factor=_number(table, "high_freq_factor", None),
            original_max_position_embeddings=_integer(table, "original_max_position_embeddings", positions),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ConfigError(f"{source}: high_freq_factor must exceed low_freq_factor: correct config.json")
        return theta, scaling
    raise ConfigError(
        f"{source}: rope type {kind!r} is not supported: 'default', 'linear' and 'llama3' are; remove it to serve "
        "the original context length"
    )


def _integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing from config.json: add it, or download the checkpoint again")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ConfigError(f"{name} must be a positive integer, not {value!r}: correct config.json")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float | None) -> float:
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing from config.json: add it, or download the checkpoint again")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise ConfigError(f"{name} must be a positive number, not {value!r}: correct config.json")
    return float(value)


def _token_ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = fields[name]
    ids = value if isinstance(value, list) else [value]
    if not ids or any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise ConfigError(f"{name} must be a token id or a list of them, not {value!r}: correct config.json")
    return tuple(ids)
