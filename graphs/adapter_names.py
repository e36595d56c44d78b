"""Names of an adapter's tensors, as trainers write them, mapped to PEFT's; settings of MLX mapped to PEFT's."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .files.untrusted_files import name_of, value_of

_NAME = r"(?!(?:weight|bias)$)[A-Za-z0-9_-]{1,128}"  # of an adapter
_PEFT_KEYS = (
    re.compile(rf"(?P<module>.+)\.(?P<part>lora_[AB])(?:\.(?P<adapter>{_NAME}))?(?P<leaf>\.weight|\.bias)"),
    re.compile(
        rf"(?P<module>.+)\.(?P<part>lora_magnitude_vector|lora_embedding_[AB]|ia3_l)(?:\.(?P<adapter>{_NAME}))?"
        r"(?P<leaf>)(?:\.weight)?"
    ),
    re.compile(r"(?P<module>.+?)\.(?:base_layer\.)?(?P<part>bias)(?P<adapter>)(?P<leaf>)"),
)
_MLX_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Levels that DDP, torch.compile and FSDP add to module names, once or several times."""
_PEFT_WRAPPER = re.compile(r"(?<![^.])base_model\.model\.")
_MULTIMODAL = re.compile(r"(?<![^.])language_model\.")
"""The level of the text model in a multimodal model."""
_MAX_SCALE = 1000
_EXPORTERS = (
    (
        re.compile(r"\.(?:lora_[ab]\.weight|magnitude)$"),
        "torchtune's, which orders the rows of q_proj and k_proj differently: save the adapter with torchtune's "
        "FullModelHFCheckpointer, which writes PEFT's format",
    ),
    (
        re.compile(r"\.(?:linear_(?:qkv|proj|fc[12])|adapter\.linear_(?:in|out))\."),
        "Megatron's, which interleaves the rows of q, k and v: export the adapter to PEFT's format with Megatron "
        "Bridge's AutoBridge.export_adapter_ckpt, or with the exporter of your trainer",
    ),
)


class AdapterFormat(NamedTuple):
    """Files of a trainer: the weights' name, the remedy for damaged files, and whether A is [in, r] and B [r, out]."""

    weights: str
    again: str
    transposed: bool = False


PEFT = AdapterFormat("adapter_model.safetensors", "save the adapter again with peft's save_pretrained")
MLX = AdapterFormat("adapters.safetensors", "save the adapter again with mlx_lm", True)


class TensorName(NamedTuple):
    """A tensor's name in PEFT's spelling.

    module    the base's module: `model.layers.0.self_attn.q_proj`
    part      `lora_A.weight`, `lora_B.weight`, `lora_B.bias`, `lora_magnitude_vector`, `lora_embedding_A` or `..._B`,
              `ia3_l`, and `bias`, a trained bias of the base
    adapter   the adapter's name, if the tensor has one
    trained   the module's name in the model that was trained, which patterns of adapter_config.json match
    """

    module: str
    part: str
    adapter: str | None
    trained: str


def tensor_name(key: str, form: AdapterFormat) -> TensorName | None:
    """Return a tensor's name in PEFT's spelling; None if it is none of an adapter's in this format."""
    plain = module_name(key)
    if form is MLX:
        module, _, part = plain.rpartition(".")
        plain = f"{module}.{_MLX_PARTS.get(part, '')}"
    for pattern in _PEFT_KEYS:
        match = pattern.fullmatch(plain)
        if match is not None:
            trained = match["module"]
            part, adapter = match["part"] + match["leaf"], match["adapter"] or None
            return TensorName(_MULTIMODAL.sub("", trained), part, adapter, trained)
    return None


def module_name(key: str) -> str:
    """Return a key without the levels that PEFT, DDP, torch.compile and FSDP add."""
    return _PEFT_WRAPPER.sub("", _WRAPPERS.sub("", key))


def plain_name(key: str) -> str:
    """Return a key in the spelling of a model without wrappers, in PEFT's spelling: `model.embed_tokens.weight`."""
    return _MULTIMODAL.sub("", module_name(key))


def exporter_problem(key: str, form: AdapterFormat) -> str | None:
    """Return what is wrong with the names of another trainer, and its exporter; None for other tensors."""
    for pattern, problem in _EXPORTERS:
        if pattern.search(key):
            return f"tensor {name_of(key)} has a name of {problem}"
    if form is PEFT and key.rpartition(".")[2] in _MLX_PARTS:
        return (
            f"tensor {name_of(key)} has a name of mlx_lm's, but adapter_config.json is not mlx_lm's: use the "
            f"adapter_config.json and {MLX.weights} that mlx_lm wrote"
        )
    return None


def is_mlx(fields: Mapping[str, Any]) -> bool:
    """Return whether an adapter_config.json is of mlx_lm."""
    return "peft_type" not in fields and ("lora_parameters" in fields or "fine_tune_type" in fields)


def peft_settings(fields: Mapping[str, Any], error: Callable[[str], ValueError]) -> dict[str, Any]:
    """Return PEFT's fields for an adapter_config.json of mlx_lm. Raises `error`.

    mlx_lm adds scale * (x A) B. All other fields are options of the trainer.
    """
    kind = fields.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise error(
            f"fine_tune_type {value_of(kind, ('full',))} is not an adapter: run mlx_lm.fuse and serve its output as a "
            "model"
        )
    parameters = fields.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise error(
            "lora_parameters must be an object with rank and scale: use the adapter_config.json that mlx_lm wrote"
        )
    rank, scale, alpha = (parameters.get(name) for name in ("rank", "scale", "alpha"))
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank < 2**31:
        raise error(f"lora_parameters.rank must be a positive integer, not {value_of(rank)}: correct it")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= _MAX_SCALE:
        raise error(f"lora_parameters.scale must be a number up to {_MAX_SCALE}, not {value_of(scale)}: correct it")
    if alpha not in (None, rank):
        raise error(
            f"lora_parameters.alpha = {value_of(alpha)} scales the adapter in old releases of mlx_lm (by alpha / rank) "
            "and is ignored by new ones: remove it, and set scale to the factor that the training used"
        )
    return {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "use_dora": kind == "dora"}
