"""EagleConfig: config.json of a published EAGLE-3 head, and whether the head fits a target.

The head is read as a Llama of one layer. Unsupported arithmetic is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..config import LlamaConfig
from ..config_fields import ConfigError, flag, integer, read_json_object

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER = "midlayer."
"""Prefix of the names of the head's layer."""
LORA_DIRECTORY = "draft"
"""Subdirectory of an adapter with the LoRA of the draft: two files as PEFT writes them."""
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_TRAINED_FOR = "serve the model that the draft was trained for, or train a draft for this one"


@dataclass(frozen=True)
class EagleConfig(LlamaConfig):
    """Shapes and constants of one head; the fields of `LlamaConfig` are those of its layer.

    draft_vocab_size      number of tokens that it can draft
    feature_layers        the head reads the target's hidden states after these three layers, ascending; empty if
                          config.json has none: see `fitted`
    norm_before_residual  the residual is the normed hidden state
    """

    draft_vocab_size: int = 0
    feature_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "EagleConfig":
        """Read config.json's fields. Raises ConfigError for unsupported arithmetic."""
        found = fields.get("architectures")
        if not isinstance(found, list) or len(found) != 1 or found[0] not in ARCHITECTURES:
            raise ConfigError(
                f"the draft's architecture {found} is not supported: name the directory of an EAGLE-3 head with "
                f"{ARCHITECTURES[0]} in its config.json"
            )
        plain = LlamaConfig.from_dict({**fields, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
        _check_supported(fields, plain)
        return cls(
            **_fields_of(plain),
            draft_vocab_size=integer(fields, "draft_vocab_size", plain.vocab_size),
            feature_layers=_feature_layers(fields),
            norm_before_residual=flag(fields, "norm_before_residual"),
        )

    def fitted(self, target: LlamaConfig) -> "EagleConfig":
        """Return the config with its `feature_layers`. Raises ConfigError unless the head fits this target.

        The head's keys and values are one more layer of the target's cache, and its embedding is the target's.
        """
        for name in ("hidden_size", "vocab_size", "num_key_value_heads", "head_dim"):
            own, wanted = getattr(self, name), getattr(target, name)
            if own != wanted:
                raise ConfigError(f"the draft's {name} is {own}, the model's is {wanted}: {_TRAINED_FOR}")
        if self.draft_vocab_size > target.vocab_size:
            raise ConfigError(
                f"the draft's draft_vocab_size {self.draft_vocab_size} is larger than its vocab_size "
                f"{target.vocab_size}: correct its config.json"
            )
        layers = self.feature_layers or published_layers(target.num_hidden_layers)
        if max(layers) > target.num_hidden_layers:
            raise ConfigError(
                f"the draft reads the model after layer {max(layers)}, but the model has {target.num_hidden_layers} "
                f"layers: {_TRAINED_FOR}"
            )
        return replace(self, feature_layers=layers)

    @property
    def vocabulary_modules(self) -> tuple[str, ...]:
        """None: the embedding is the target's."""
        return ()

    def _shape(self, module: str, head_dim: int) -> tuple[int, int]:
        """Return the shape of a projection; q, k and v read an embedding and a hidden state."""
        outputs, inputs = super()._shape(module, head_dim)
        packed = module.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "qkv_proj")
        return outputs, 2 * inputs if packed else inputs

    def _in_each_layer(self, names: tuple[str, ...]) -> list[str]:
        return [module.replace("model.layers.0.", LAYER, 1) for module in super()._in_each_layer(names)]


def read_eagle_config(directory: str | Path) -> EagleConfig:
    """Read `directory`/config.json. Raises ConfigError."""
    remedy = "point at a directory with an EAGLE-3 head: config.json and model.safetensors"
    return EagleConfig.from_dict(read_json_object(Path(directory) / "config.json", ConfigError, remedy))


def published_layers(layers: int) -> tuple[int, int, int]:
    """Return the default feature layers for a target of `layers` layers. Raises ConfigError if these are too few."""
    chosen = (2, layers // 2, layers - 3)
    if not 2 <= chosen[1] <= chosen[2]:
        raise ConfigError(
            f"the draft's config.json does not list the layers that it reads, and there is no default for a model of "
            f"{layers} layers (fewer than 6): add {_LAYER_IDS} to it"
        )
    return chosen


def _feature_layers(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers from the head's own field, or from SGLang's `eagle_config`, which counts from 0."""
    nested = fields.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError("eagle_config must be an object: correct the draft's config.json")
    ids, offset = (fields[_LAYER_IDS], 0) if fields.get(_LAYER_IDS) is not None else (nested.get(_LAYER_IDS), 1)
    if ids is None:
        return ()
    if not isinstance(ids, list) or len(ids) != 3 or any(type(each) is not int for each in ids):
        raise ConfigError(f"{_LAYER_IDS} must be a list of three layers: correct the draft's config.json")
    layers = tuple(each + offset for each in ids)
    if not 1 <= layers[0] <= layers[1] <= layers[2]:
        raise ConfigError(f"{_LAYER_IDS} {ids} must name layers in ascending order: correct the draft's config.json")
    return layers


def _check_supported(fields: Mapping[str, Any], plain: LlamaConfig) -> None:
    """Raise ConfigError for unsupported heads."""
    nested = fields.get("eagle_config")
    if plain.num_hidden_layers != 1:
        raise ConfigError(f"a draft of {plain.num_hidden_layers} layers is not supported: use a head of one layer")
    if plain.stored_head_dim != plain.head_dim:
        raise ConfigError(
            f"a draft with heads of {plain.stored_head_dim} is not supported: use a head with head_dim "
            f"{plain.head_dim}, or train one for this model"
        )
    if plain.biases or plain.weight_format:
        unsupported = "biases" if plain.biases else "projections in eight bits"
        raise ConfigError(f"a draft with {unsupported} is not supported: use a head without them")
    if integer(fields, "target_hidden_size", plain.hidden_size) != plain.hidden_size:
        raise ConfigError(
            f"target_hidden_size differs from hidden_size {plain.hidden_size}, which is not supported: use a head with "
            "the hidden_size of its model"
        )
    if isinstance(nested, Mapping) and nested.get("use_aux_hidden_state") is False:
        raise ConfigError(
            "use_aux_hidden_state is false: the draft reads one hidden state instead of three, as EAGLE-1 does; use an "
            "EAGLE-3 head"
        )


def _fields_of(config: LlamaConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}
