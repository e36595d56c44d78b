"""adapter_config.json of PEFT: honoured, harmless and refused fields."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .adapter_names import MLX, PEFT, AdapterFormat, is_mlx, peft_settings
from .config_fields import read_json_object
from .files.untrusted_files import name_of, value_of
from .peft_patterns import MAX_PATTERNS, LookAroundError, PatternError, PeftPatterns

CONFIG = "adapter_config.json"
_AGAIN = PEFT.again


class AdapterError(ValueError):
    """An adapter cannot be served; the message names the field or tensor and the remedy."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# fields that do not change the computation of a plain LoRA layer, for any value
_HARMLESS = _words(
    """
    peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode lora_dropout megatron_core
    eva_config runtime_config qalora_group_size ensure_weight_tying loftq_config corda_config lora_ga_config
    """
)
_HONOURED = _words(
    """
    r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules layers_to_transform
    layers_pattern bias init_lora_weights task_type modules_to_save trainable_token_indices use_dora lora_bias
    alora_invocation_tokens target_parameters
    """
)
_IA3_FIELDS = _words("target_modules exclude_modules feedforward_modules modules_to_save task_type init_ia3_weights")
_MERGE = "merge the adapter into its base (merge_and_unload) and serve that, or train plain LoRA"
_REFUSED = {
    "layer_replication": "replicated layers are not supported: apply the replication to the base checkpoint and "
    "train on that",
    "fan_in_fan_out": "transposed weights (Conv1D) do not occur in Llama: train with fan_in_fan_out=False",
    "megatron_config": "Megatron's parallel layers are not supported: export the adapter as plain PEFT LoRA",
    "use_qalora": f"QALoRA is not supported: {_MERGE}",
    "use_bdlora": f"BD-LoRA is not supported: {_MERGE}",
    "arrow_config": "Arrow routing is not supported: train one LoRA adapter, or serve this one with peft",
    "velora_config": f"VeLoRA is not supported: {_MERGE}",
    "monteclora_config": f"MonteCLoRA is not supported: {_MERGE}",
    "kasa_config": f"KaSA is not supported: {_MERGE}",
}
_NOT_MERGED = _words(
    "ADAPTION_PROMPT CARTRIDGE CPT MULTITASK_PROMPT_TUNING PREFIX_TUNING PROMPT_TUNING P_TUNING POLY SHADOW XLORA"
)
_NO_MERGE = "it cannot be merged into a model: serve it with peft, or train LoRA"
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_INITS = (*_CHANGED_BASE, *(f"pissa_niter_{count}" for count in range(1, 65)), "mica", "true", "True")
_BIASES = ("none", "all", "lora_only")
_TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_PEFT_TYPES = _words(
    """
    ADALORA ADAMSS ADAPTION_PROMPT BEFT BOFT C3A CARTRIDGE CPT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA LILY
    LN_TUNING LOHA LOKR MISS MULTITASK_PROMPT_TUNING OFT OSF POLY PREFIX_TUNING PROMPT_TUNING PSOFT PVERA P_TUNING
    RANDLORA ROAD SHADOW SHIRA TINYLORA TRAINABLE_TOKENS UNILORA VBLORA VERA WAVEFT XLORA
    """
)
_EMBEDDINGS = ("embed_tokens", "lm_head")
MAX_CONFIG_BYTES = 256 << 10
"""A config with one rank per module of a large model has 30 kB. The limit exists because json holds the GIL."""
MAX_NAMES = 4096
MAX_RANK = 256
"""Maximum rank of an adapter; `ops.lora.expand` has the same limit."""
MAX_ALPHA = 1e6
MAX_INVOCATION = 64
_MAX_VERSION = 64
MAX_TRAINED_TOKENS = 256
"""Maximum trained tokens of a module, which need a rank each."""


@dataclass(frozen=True)
class AdapterConfig:
    """The honoured fields, spelled as in the file.

    invocation  aLoRA's alora_invocation_tokens: the adapter is active from the last place in the prompt where they
                occur; (): from the first token
    target_parameters  names of parameters with LoRA; those of routers and experts, see `moe.adapter_layouts`
    peft_version       the release of PEFT that wrote the files, which no field says otherwise
    ia3                whether it is IA3, which has no rank and no scaling
    feedforward_modules  IA3's targets with factors of their inputs, as in the file: names, a pattern, or None
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    target_modules: Any = ()
    exclude_modules: Any = None
    layers_to_transform: Any = None
    layers_pattern: Any = None
    bias: str = field(default="none", repr=False)
    modules_to_save: tuple[str, ...] = field(default=(), repr=False)
    trainable_token_indices: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    use_dora: bool = field(default=False, repr=False)
    lora_bias: bool = field(default=False, repr=False)
    form: AdapterFormat = field(default=PEFT, repr=False)
    invocation: tuple[int, ...] = field(default=(), repr=False)
    target_parameters: tuple[str, ...] = field(default=(), repr=False)
    peft_version: str = field(default="", repr=False)
    ia3: bool = field(default=False, repr=False)
    feedforward_modules: Any = field(default=None, repr=False)
    _patterns: PeftPatterns = field(default_factory=PeftPatterns, repr=False, compare=False)

    @classmethod
    def from_directory(
        cls, directory: Path, lenient: bool = False, roots: Sequence[Path] | None = None
    ) -> "AdapterConfig":
        """Read `directory`/adapter_config.json, which must be under one of `roots` if given. Raises AdapterError."""
        remedy = "give the directory that peft's save_pretrained wrote"
        fields = read_json_object(directory / CONFIG, AdapterError, remedy, MAX_CONFIG_BYTES, roots, CONFIG)
        return cls.from_dict(fields, lenient)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], lenient: bool = False) -> "AdapterConfig":
        """Check every field. `lenient` ignores unknown fields. Raises AdapterError."""
        if is_mlx(fields):
            return replace(cls.from_dict(peft_settings(fields, _config_error)), form=MLX)
        ia3 = fields.get("peft_type") == "IA3"
        if fields.get("peft_type") != "LORA" and not ia3:
            kind = value_of(fields.get("peft_type"), _PEFT_TYPES)
            remedy = _NO_MERGE if kind.strip("'") in _NOT_MERGED else _MERGE
            raise AdapterError(f"peft_type {kind} is not supported: only LORA and IA3 are; {remedy}")
        for name, reason in _REFUSED.items():
            if fields.get(name) not in (None, False, [], {}):
                raise AdapterError(f"{CONFIG}: {name} is set: {reason}")
        _check_choices(fields)
        if not lenient:
            known = _HARMLESS | _REFUSED.keys() | (_IA3_FIELDS if ia3 else _HONOURED)
            for name, value in fields.items():
                if name not in known and value not in (None, False, [], {}, ""):
                    raise AdapterError(
                        f"{CONFIG}: unknown field {name_of(name)} may change the adapter's computation: "
                        f"{_MERGE}; if it has no effect on this adapter, start with lora_lenient=True"
                    )
        targets = _names(fields, "target_modules") or ()
        feedforward = _names(fields, "feedforward_modules") if ia3 else None
        if isinstance(targets, tuple) and targets and isinstance(feedforward, tuple):  # as in PEFT
            for name in sorted(set(feedforward) - set(targets))[:1]:
                raise AdapterError(
                    f"{CONFIG}: feedforward_modules names {name_of(name)}, which target_modules does not: {_AGAIN}"
                )
        return cls(
            r=_rank("r", fields.get("r", 8)),
            lora_alpha=_alpha("lora_alpha", fields.get("lora_alpha", 8)),
            use_rslora=_typed(fields, "use_rslora", bool, False),
            rank_pattern=_table(fields, "rank_pattern", _rank),
            alpha_pattern=_table(fields, "alpha_pattern", _alpha),
            target_modules=targets,
            exclude_modules=_names(fields, "exclude_modules"),
            layers_to_transform=_layers(fields.get("layers_to_transform")),
            layers_pattern=_names(fields, "layers_pattern"),
            bias=fields.get("bias", "none"),
            modules_to_save=_saved_modules(fields),
            trainable_token_indices=_trained_tokens(fields.get("trainable_token_indices")),
            use_dora=_typed(fields, "use_dora", bool, False),
            lora_bias=_typed(fields, "lora_bias", bool, False),
            invocation=_invocation(fields.get("alora_invocation_tokens")),
            target_parameters=_parameters(fields),
            peft_version=str(fields.get("peft_version", ""))[:_MAX_VERSION],
            ia3=ia3,
            feedforward_modules=feedforward,
        )

    def rank_of(self, module: str) -> int:
        """Return the rank that the config gives `module`."""
        return self._pattern(self.rank_pattern, "rank_pattern", module, self.r)

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor of B A: alpha / rank, or alpha / sqrt(rank) with use_rslora."""
        alpha = self._pattern(self.alpha_pattern, "alpha_pattern", module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Return whether the config applies LoRA to `module`. Raises LookAroundError for an undecidable pattern."""
        try:
            return self._patterns.targeted(
                module, self.target_modules, self.exclude_modules, self.layers_to_transform, self.layers_pattern
            )
        except LookAroundError:
            raise
        except PatternError as problem:
            raise AdapterError(f"{CONFIG}: target_modules, exclude_modules or layers_pattern: {problem}") from None

    def scales_inputs(self, module: str) -> bool | None:
        """Return whether IA3 multiplies a target's inputs instead of its outputs; None if the config does not tell."""
        names = self.feedforward_modules
        if names is None:
            return None
        if not isinstance(names, str):
            return module.endswith(tuple(names))  # as in PEFT, also within a level of the name
        try:
            return self._patterns.compile(names).fullmatch(module) is not None
        except LookAroundError:
            return None
        except PatternError as problem:
            raise AdapterError(f"{CONFIG}: feedforward_modules: {problem}") from None

    @property
    def method(self) -> str:
        """The name of the method, for messages."""
        return "IA3" if self.ia3 else "LoRA"

    def targets_parameter(self, name: str) -> bool:
        """Return whether `target_parameters` names the parameter `name`, a full name."""
        return any(name == target or name.endswith(f".{target}") for target in self.target_parameters)

    @property
    def identity(self) -> str:
        """Text of all settings that affect outputs. Fields that most adapters do not set are in it only if set."""
        more = f"{self.modules_to_save} {self.trainable_token_indices}"
        return (
            repr(self)
            + (more if self.modules_to_save or self.trainable_token_indices else "")
            + (f" {self.invocation}" if self.invocation else "")
            + (f" parameters {self.target_parameters}" if self.target_parameters else "")
            + (f" ia3 {self.feedforward_modules}" if self.ia3 else "")
        )

    def check_invocation(self, vocabulary: int) -> None:
        """Raise AdapterError for an invocation with a token that the base does not have."""
        foreign = [token for token in self.invocation if token >= vocabulary]
        if foreign:
            raise AdapterError(
                f"{CONFIG}: alora_invocation_tokens has token {foreign[0]}, but the base has tokens 0 to "
                f"{vocabulary - 1}: the adapter was trained on another base; use that one"
            )

    def _pattern(self, patterns: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
        try:
            return self._patterns.first_match(patterns, module, default)
        except PatternError as problem:
            raise AdapterError(f"{CONFIG}: {name}: {problem}") from None


def _config_error(problem: str) -> AdapterError:
    return AdapterError(f"{CONFIG}: {problem}")


def _check_choices(fields: Mapping[str, Any]) -> None:
    """Raise AdapterError for values of bias, init_lora_weights and task_type that change the computation."""
    bias = fields.get("bias", "none")
    if bias not in _BIASES:
        raise AdapterError(f"{CONFIG}: bias = {value_of(bias)} must be one of {', '.join(_BIASES)}: {_AGAIN}")
    if fields.get("use_dora") is True and fields.get("lora_bias") is True:
        raise AdapterError(f"{CONFIG}: use_dora and lora_bias are both set, which PEFT does not define: train with one")
    init = fields.get("init_lora_weights", True)
    if isinstance(init, str) and init.startswith(_CHANGED_BASE):
        raise AdapterError(
            f"{CONFIG}: init_lora_weights={value_of(init, _INITS)} changed the base while training: convert the "
            "adapter to plain LoRA in its trainer (PiSSA, OLoRA and CorDA: save_pretrained with "
            "path_initial_model_for_weight_conversion), or merge it there, into the changed base"
        )
    if not (isinstance(init, bool) or init is None or init in _PLAIN_INITS):
        raise AdapterError(f"{CONFIG}: init_lora_weights = {value_of(init, _INITS)} is not supported: {_MERGE}")
    task = fields.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise AdapterError(
            f"{CONFIG}: task_type = {value_of(task, _TASKS)} is not supported: only CAUSAL_LM adapters generate text; "
            "train one for it"
        )


def _typed(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise AdapterError(f"{CONFIG}: {name} must be of type {kind.__name__}, not {value_of(value)}: {_AGAIN}")
    return value


def _rank(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise AdapterError(f"{CONFIG}: {name} must be a positive integer, not {value_of(value)}: {_AGAIN}")
    return value


def _alpha(name: str, value: Any) -> float:
    # `not <`: also true for NaN
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MAX_ALPHA:
        raise AdapterError(f"{CONFIG}: {name} must be a number below {MAX_ALPHA:.0f}, not {value_of(value)}: {_AGAIN}")
    return float(value)


def _table(fields: Mapping[str, Any], name: str, checked: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return pattern -> checked value."""
    table = _typed(fields, name, dict, {})
    if len(table) > MAX_PATTERNS:
        raise AdapterError(f"{CONFIG}: {name} has {len(table)} patterns, more than {MAX_PATTERNS}: use fewer")
    return {pattern: checked(f"{name}[{name_of(pattern)}]", value) for pattern, value in table.items()}


def _saved_modules(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names. Raises AdapterError for a module other than the embedding and the output head."""
    names = _names(fields, "modules_to_save") or ()
    for name in (names,) if isinstance(names, str) else names:
        if name.rpartition(".")[2] not in _EMBEDDINGS:
            raise AdapterError(
                f"{CONFIG}: modules_to_save names {name_of(name)}: only {' and '.join(_EMBEDDINGS)} may be saved "
                "whole, if few of their rows were changed: train without modules_to_save, or merge the adapter into "
                "its base"
            )
    return (names,) if isinstance(names, str) else tuple(names)


def _trained_tokens(value: Any) -> dict[str, tuple[int, ...]]:
    """Return module -> ids of `trainable_token_indices`, as PEFT reads it: a list is of the embedding."""
    if value in (None, False, [], {}):
        return {}
    table = value if isinstance(value, dict) else {"embed_tokens": value}
    return {str(name): _token_ids(ids) for name, ids in table.items()}


def _token_ids(value: Any) -> tuple[int, ...]:
    entries: Sequence[Any] = value if isinstance(value, list) else ()
    wrong = [each for each in entries if type(each) is not int or not 0 <= each < 2**31]
    if not entries or wrong or len(set(entries)) != len(entries) or len(entries) > MAX_TRAINED_TOKENS:
        found = "a token twice" if not wrong and entries else value_of((wrong or [value])[0])
        if len(entries) > MAX_TRAINED_TOKENS:
            found = f"{len(entries)} tokens"
        raise AdapterError(
            f"{CONFIG}: trainable_token_indices has {found}; it must list at most {MAX_TRAINED_TOKENS} different "
            f"token ids: {_AGAIN}"
        )
    return tuple(entries)


def _names(fields: Mapping[str, Any], name: str) -> Any:
    """Return None, one string or a tuple of strings."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise AdapterError(f"{CONFIG}: {name} must be a string or a list of strings, not {value_of(value)}: {_AGAIN}")
    _check_length(name, value)
    return tuple(dict.fromkeys(value))


def _parameters(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `target_parameters`, which PEFT saves sorted or not."""
    names = _names(fields, "target_parameters") or ()
    return (names,) if isinstance(names, str) else tuple(sorted(names))


def _check_length(name: str, value: list[Any]) -> None:
    if len(value) > MAX_NAMES:
        raise AdapterError(f"{CONFIG}: {name} has {len(value)} entries, more than {MAX_NAMES}: name modules by suffix")


def _invocation(value: Any) -> tuple[int, ...]:
    """Return the token ids of aLoRA's invocation; () for plain LoRA, as which PEFT treats an empty list, too."""
    if value in (None, False, [], {}):
        return ()
    name = f"{CONFIG}: alora_invocation_tokens"
    if not isinstance(value, list):
        raise AdapterError(f"{name} must be a list of token ids, not {value_of(value)}: {_AGAIN}")
    if len(value) > MAX_INVOCATION:
        raise AdapterError(
            f"{name} has {len(value)} token ids, more than {MAX_INVOCATION}: train with a shorter invocation"
        )
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise AdapterError(f"{name} must be token ids of the base, from 0 on, not {value_of(token)}: {_AGAIN}")
    return tuple(value)


def _layers(value: Any) -> Any:
    """Return None, one layer or a list of layers."""
    entries = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(entry, bool) or not isinstance(entry, int) for entry in entries):
        raise AdapterError(f"{CONFIG}: layers_to_transform must be layer numbers, not {value_of(value)}: {_AGAIN}")
    _check_length("layers_to_transform", entries)
    return value
