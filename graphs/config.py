"""LlamaConfig: shapes and constants from a checkpoint's config.json, as transformers 4 or 5 writes it.

Fields that would change the arithmetic and are not supported are refused by name; other fields are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from .config_fields import (
    ConfigError,
    RopeScaling,
    integer,
    number,
    read_json_object,
    rope_scaling,
    rotary_dim,
    token_ids,
)
from .families import ATTENTION_MODULES, MLP_MODULES, PACKED_MODULES, VOCABULARY_MODULES, family_of
from .quantization_config import experts_in_16_bits, modules_in_16_bits, stored_dtype, stored_format

HEAD_DIMS = (64, 128)
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class LlamaConfig:
    """Shapes and constants of a Llama, or of another family (`families.py` sets the last fields).

    Field names are those of config.json; `dtype` is the checkpoint's, as torch spells it.
    biases                names of the projections with a bias
    head_norms            each head of q and of k is normed before RoPE
    unrotated_layers      layers without RoPE
    embedding_multiplier, residual_multiplier  factors of the embedding, and of each layer's addition to the residual
    attention_multiplier  the softmax scale; None: head_dim ** -0.5
    logits_scaling        divisor of the logits
    weight_format         "int8" or "fp8" for projections stored in eight bits with a scale for each channel
    plain_projections     full names of projections that such a checkpoint stores in 16 bits
    packed_checkpoint     checkpoints and adapters store q/k/v as one tensor, and gate/up as one tensor
    sliding_window        newest tokens that attention reads, the query's own included; None: all
    full_layers           layers without the window: attention reads all tokens
    stored_head_dim       dimensions of a head in checkpoints and adapters, at most `head_dim` (`head_layout.py`)
    rotary_dim            number of dimensions that RoPE rotates, the first ones
    num_experts           experts of a sparse layer; 0: all layers are dense
    num_experts_per_tok   experts that each token uses
    expert_intermediate_size  intermediate size of an expert
    norm_topk_prob        the weights of a token's experts add up to 1
    dense_layers          layers with a dense MLP in a model with experts
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
    rope_scaling: RopeScaling = RopeScaling()  # noqa: RUF009  it is frozen
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    biases: tuple[str, ...] = ()
    head_norms: bool = False
    unrotated_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    weight_format: str = ""
    plain_projections: tuple[str, ...] = ()
    packed_checkpoint: bool = False
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    stored_head_dim: int = 0
    rotary_dim: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"head_dim {self.head_dim} is not supported: the attention kernels support {HEAD_DIMS[0]} and "
                f"{HEAD_DIMS[1]}; use a model with one of these"
            )
        if not self.stored_head_dim:
            object.__setattr__(self, "stored_head_dim", self.head_dim)
        if not self.rotary_dim:
            object.__setattr__(self, "rotary_dim", self.stored_head_dim)
        if self.head_norms and self.rearranges_heads:
            raise ConfigError(
                f"head_dim {self.stored_head_dim} is not supported with norms of the heads of q and k, only "
                f"{HEAD_DIMS[0]} and {HEAD_DIMS[1]}; use a model with one of these"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}: correct config.json"
            )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "LlamaConfig":
        """Read config.json's fields. Raises ConfigError for unsupported arithmetic."""
        family = family_of(fields)
        fields = {**family.defaults, **fields}
        _check_activation(fields)
        heads = integer(fields, "num_attention_heads")
        hidden = integer(fields, "hidden_size")
        if fields.get("head_dim") is None and hidden % heads:
            raise ConfigError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}: set head_dim in config.json"
            )
        positions = integer(fields, "max_position_embeddings", 2048)
        width = integer(fields, "head_dim", hidden // heads)
        rotary = rotary_dim(fields, width, family.partial_rotary)
        theta, scaling = rope_scaling(fields, positions, rotary)
        if scaling.kind == "yarn":  # config.json may have the number of positions before scaling
            positions = max(positions, int(scaling.factor * scaling.original_max_position_embeddings))
        eos = fields.get("eos_token_id")
        dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not supported: use a checkpoint in one of {', '.join(_DTYPES)}")
        config = cls(
            vocab_size=integer(fields, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=integer(fields, "intermediate_size"),
            num_hidden_layers=integer(fields, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=integer(fields, "num_key_value_heads", heads),
            head_dim=_kernels_head_dim(width),
            stored_head_dim=width,
            rotary_dim=rotary,
            rms_norm_eps=number(fields, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=positions,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            dtype=dtype,
            bos_token_id=token_ids(fields, "bos_token_id")[0] if fields.get("bos_token_id") is not None else None,
            eos_token_ids=token_ids(fields, "eos_token_id") if eos is not None else (),
            weight_format=stored_format(fields),
            **family.differences(fields),
        )
        if not config.weight_format:
            return config
        stored = modules_in_16_bits(fields, config.stored_modules())
        plain = [part for name in stored for part, *_ in config.parts_of(name)]
        sparse = [layer for layer in range(config.num_hidden_layers) if config.is_sparse(layer)]
        return replace(config, plain_projections=(*plain, *experts_in_16_bits(fields, sparse, config.num_experts)))

    @classmethod
    def from_directory(cls, directory: str | Path) -> "LlamaConfig":
        """Read `directory`/config.json; a missing dtype is that of the weights. See also `checkpoint_config`."""
        remedy = "point at a directory with a Hugging Face checkpoint"
        fields = read_json_object(Path(directory) / "config.json", ConfigError, remedy)
        dtype = fields.get("dtype") or fields.get("torch_dtype") or stored_dtype(Path(directory))
        return cls.from_dict(fields if dtype is None else {**fields, "dtype": dtype})

    def module_shape(self, module: str) -> tuple[int, int]:
        """Return (output, input) features of a projection: module_shape("q_proj") or its full name."""
        return self._shape(module, self.head_dim)

    def stored_shape(self, module: str) -> tuple[int, int]:
        """Return (output, input) features of a projection in checkpoints and adapters, with possibly smaller heads."""
        return self._shape(module, self.stored_head_dim)

    def _shape(self, module: str, head_dim: int) -> tuple[int, int]:
        queries, keys = self.num_attention_heads * head_dim, self.num_key_value_heads * head_dim
        inner = self.expert_intermediate_size if ".experts." in module else self.intermediate_size
        shapes = {
            "q_proj": (queries, self.hidden_size),
            "k_proj": (keys, self.hidden_size),
            "v_proj": (keys, self.hidden_size),
            "o_proj": (self.hidden_size, queries),
            "gate_proj": (inner, self.hidden_size),
            "up_proj": (inner, self.hidden_size),
            "down_proj": (self.hidden_size, inner),
            "qkv_proj": (queries + 2 * keys, self.hidden_size),
            "gate_up_proj": (2 * inner, self.hidden_size),
            "gate": (self.num_experts, self.hidden_size),
            "embed_tokens": (self.hidden_size, self.vocab_size),
            "lm_head": (self.vocab_size, self.hidden_size),
        }
        return shapes[module.rpartition(".")[2]]

    def window_of(self, layer: int) -> int:
        """Return a layer's window in tokens; 0: no window, or one that is at least the longest context."""
        if self.sliding_window is None or self.sliding_window >= self.max_position_embeddings:
            return 0
        return 0 if layer in self.full_layers else self.sliding_window

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def num_sparse_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.is_sparse, range(self.num_hidden_layers)))

    def up_to(self, tokens: int) -> Self:
        """Return the config for contexts of at most `tokens`: without a longer window, with longrope's frequencies.

        longrope has other frequencies for long contexts. They are fixed here by the limit and not by a text's length,
        because the cached keys of a growing text must stay valid.
        """
        config = self
        if self.sliding_window is not None and self.sliding_window >= tokens:
            config = replace(config, sliding_window=None, full_layers=())
        if self.usual_context < tokens <= self.max_position_embeddings:
            config = replace(config, rope_scaling=replace(self.rope_scaling, factors=self.rope_scaling.long_factors))
        return config

    @property
    def usual_context(self) -> int:
        """Default limit of the context, in tokens."""
        if self.rope_scaling.kind != "longrope":
            return self.max_position_embeddings
        return min(self.max_position_embeddings, self.rope_scaling.original_max_position_embeddings)

    @property
    def rearranges_heads(self) -> bool:
        """Whether heads in checkpoints and adapters differ from those of the graph."""
        return not self.head_dim == self.stored_head_dim == self.rotary_dim

    def softmax_scale_of(self, layer: int) -> float:
        """Return the factor of a layer's scores. `attention_factor` is squared: it scales queries and keys."""
        scale = self.attention_multiplier or self.stored_head_dim**-0.5
        return scale if layer in self.unrotated_layers else scale * self.rope_scaling.attention_factor**2

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of a layer's projections, in order."""
        return ATTENTION_MODULES + MLP_MODULES

    def linear_modules(self) -> list[str]:
        """Return the full names of all projections that may have a LoRA adapter, layer by layer, without experts."""
        return self._in_each_layer((*ATTENTION_MODULES, *MLP_MODULES))

    def stored_modules(self) -> list[str]:
        """Return the full names of these projections in checkpoints and adapters, which may pack them."""
        packed = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        return self._in_each_layer(packed) if self.packed_checkpoint else self.linear_modules()

    @property
    def vocabulary_modules(self) -> tuple[str, ...]:
        """Full names of the embedding and the output head, which adapters may change."""
        return VOCABULARY_MODULES

    def biased_modules(self) -> set[str]:
        """Return the full names of the stored modules with a bias."""
        return {module for module in self.stored_modules() if module.rpartition(".")[2] in self.biases}

    def parts_of(self, module: str) -> list[tuple[str, int, int]]:
        """Return (full name, first row, end row) of each projection in a stored module: three for `...qkv_proj`."""
        parent, dot, name = module.rpartition(".")
        found, row = [], 0
        for part in PACKED_MODULES.get(name, (name,)):
            rows = self.stored_shape(part)[0]
            found.append((f"{parent}{dot}{part}", row, row + rows))
            row += rows
        return found

    def _in_each_layer(self, names: tuple[str, ...]) -> list[str]:
        parents = ["mlp" if name in (*MLP_MODULES, "gate_up_proj") else "self_attn" for name in names]
        return [
            f"model.layers.{layer}.{parent}.{name}"
            for layer in range(self.num_hidden_layers)
            for parent, name in zip(parents, names, strict=True)
            if parent != "mlp" or not self.is_sparse(layer)
        ]


def _check_activation(fields: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the activation is SiLU."""
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not supported: use a checkpoint with 'silu'")


def _kernels_head_dim(stored: int) -> int:
    """Return the graph's head dimension: the smallest of HEAD_DIMS that holds the checkpoint's."""
    wide = next((width for width in HEAD_DIMS if width >= stored), None)
    if wide is None or stored % 2:
        raise ConfigError(
            f"head_dim {stored} is not supported: use a model with an even head_dim of at most {HEAD_DIMS[-1]}"
        )
    return wide
