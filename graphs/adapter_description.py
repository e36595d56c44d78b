"""Config and header of a PEFT adapter, checked against the base: everything needed to read its tensors.

This file does not import torch, so that a small separate process can check adapters for a GPU process.
"""

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .adapter_config import CONFIG, AdapterConfig, AdapterError
from .adapter_vocabulary import MAX_VOCABULARY_TENSORS, VocabularyTensors, find_vocabulary
from .config import LlamaConfig
from .families import ADAPTER_PARTS, ATTENTION_MODULES, MLP_MODULES, PACKED_MODULES, VOCABULARY_TARGETS
from .model_directory import WEIGHTS, missing_adapter
from .peft_patterns import ALL_LINEAR, LookAroundError
from .safetensors_header import ITEM_BYTES, Layout, read_layout
from .untrusted_files import name_of, value_of

AGAIN = "save the adapter again with peft's save_pretrained"
MERGE = "merge the adapter into its base (merge_and_unload) and serve that"
_TENSORS_PER_MODULE = 6  # A, B, parts, and unsupported tensors, so that the error can name them
_NAMED = r"(?:\.(?P<adapter>[A-Za-z0-9_-]{1,128}))?"
_KEYS = {
    kind: re.compile(rf"(?P<module>.+?)\.(?:{spelling})")
    for kind, spelling in {
        "A": rf"lora_A{_NAMED}\.weight",
        "embedding_A": rf"lora_embedding_A{_NAMED}",
        "embedding_B": rf"lora_embedding_B{_NAMED}",
        "B": rf"lora_B{_NAMED}\.weight",
        "magnitude": rf"lora_magnitude_vector(?!\.weight$){_NAMED}(?:\.weight)?|lora_magnitude_vector\.weight",
        "lora_bias": rf"lora_B{_NAMED}\.bias",
        "bias": r"(?:base_layer\.)?bias",
    }.items()
}
"""Kinds of tensors, and how a file spells their names."""
PART_OF = {"magnitude": "dora", "lora_bias": "bias", "bias": "bias"}
"""Kinds of tensors besides A and B -> the part of an adapter (ADAPTER_PARTS) to which they belong."""
_WRAPPERS = re.compile(r"(?<![^.])(?:base_model\.model|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Prefixes that PEFT, torch.compile and FSDP add to module names, once or several times."""
_OTHER_BASE = "the adapter was trained on another base; use that one"
_PROJECTIONS = (*ATTENTION_MODULES, *MLP_MODULES, *PACKED_MODULES)
_DTYPES = ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "U16", "I32", "U32", "I64", "U64", "F64")


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter without its values.

    layout        header of the weights' file
    pairs         stored module (`model.layers.0.self_attn.q_proj`; in packed checkpoints `...qkv_proj`) ->
                  (tensor name of A, tensor name of B), in the model's order
    scaling       module -> factor of B A
    parts         module -> kind of tensor (a key of PART_OF) -> tensor name; also modules without LoRA
    settings_sum  sha256 (hex) of adapter_config.json's settings
    differences   contradictions between the tensors and adapter_config.json (the tensors are served)
    vocabulary    tensors of the embedding and the output head that are not LoRA
    """

    layout: Layout
    pairs: dict[str, tuple[str, str]]
    scaling: dict[str, float]
    settings_sum: str
    differences: tuple[str, ...] = ()
    parts: dict[str, dict[str, str]] = {}
    vocabulary: VocabularyTensors = VocabularyTensors()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The adapter's parts besides LoRA, of ADAPTER_PARTS."""
        found = {PART_OF[kind] for tensors in self.parts.values() for kind in tensors}
        return tuple(part for part in ADAPTER_PARTS if part in found)

    @property
    def modules(self) -> list[str]:
        """Modules with LoRA or parts, those with LoRA first."""
        return list(dict.fromkeys([*self.pairs, *self.parts]))

    def names_of(self, module: str) -> list[str]:
        """Return the names of a module's tensors."""
        return [*self.pairs.get(module, ()), *self.parts.get(module, {}).values()]

    def rank(self, module: str) -> int:
        """Return the module's rank: the number of rows of its A."""
        return self.layout.places[self.pairs[module][0]].shape[0]

    def check(self, config: LlamaConfig, max_rank: int) -> None:
        """Raise ValueError unless this is a valid adapter of the base; call it on descriptions from another process."""
        self.vocabulary.check(self.layout, config)
        modules, count = {*config.stored_modules(), *config.vocabulary_modules}, len(self.vocabulary)
        for module in self.modules:
            names = self.names_of(module)
            if module not in modules or not all(name in self.layout.places for name in names):
                raise ValueError("a module or tensor that does not exist")
            if not all(self.layout.is_inside_file(name) for name in names):
                raise ValueError("a tensor outside of the file")
            count += len(names)
        for module, pair in self.pairs.items():
            if _check_shapes(self.layout, module, pair, config) > max_rank:
                raise ValueError("a rank above the limit")
        _check_parts(self.layout, self.pairs, self.parts, config)
        if not self.pairs or self.scaling.keys() != self.pairs.keys() or count != len(self.layout.places):
            raise ValueError("modules and tensors that do not match")
        if not all(math.isfinite(scale) for scale in self.scaling.values()):
            raise ValueError("a scaling that is not a finite number")


def describe_adapter(
    directory: Path, config: LlamaConfig, max_rank: int, lenient: bool = False, roots: Sequence[Path] | None = None
) -> Description:
    """Read adapter_config.json and the weights' header in `directory`, for the base of `config`.

    `max_rank`: the largest rank allowed. `lenient`: ignore unknown fields of adapter_config.json. `roots`: resolved
    directories; after all links, each file must be inside one of them (None: anywhere). Only regular safetensors files
    are read. Raises AdapterError with the field or tensor and the remedy; it quotes nothing else from a file.
    """
    try:
        reason = None if os.path.lexists(directory / CONFIG) else missing_adapter(directory)
        only_a_pickle = not (directory / WEIGHTS).exists() and (directory / "adapter_model.bin").exists()
    except OSError as problem:
        remedy = "check the path's length and permissions"
        raise AdapterError(f"its directory cannot be read ({problem.strerror}): {remedy}") from None
    if reason is not None:
        raise AdapterError(reason)
    settings = AdapterConfig.from_directory(directory, lenient, roots)
    if only_a_pickle:
        raise AdapterError(
            "adapter_model.bin is a pickle, which can run code and is never loaded: save the adapter again with "
            "save_pretrained(safe_serialization=True)"
        )
    # unpacked modules also of a packed base: the error names tensors of an unpacked adapter
    max_tensors = _TENSORS_PER_MODULE * len(config.linear_modules()) + MAX_VOCABULARY_TENSORS
    layout = read_layout(directory / WEIGHTS, AdapterError, AGAIN, max_tensors, roots, foreign=_OTHER_BASE)
    names = {key: _WRAPPERS.sub("", key) for key in layout.places}
    vocabulary = find_vocabulary(layout, names, config, settings)
    pairs, parts = _tensors({key: name for key, name in names.items() if key not in vocabulary.names}, config)
    ranks = {module: _check_rank(layout, module, names, config, settings, max_rank) for module, names in pairs.items()}
    _check_parts(layout, pairs, parts, config)
    _check_settings(settings, pairs, parts, config)
    return Description(
        layout=layout,
        pairs=pairs,
        scaling={module: settings.scaling(module, rank) for module, rank in ranks.items()},
        settings_sum=hashlib.sha256(settings.text.encode()).hexdigest(),
        differences=_differences(settings, config, set(pairs)),
        parts=parts,
        vocabulary=vocabulary,
    )


def _tensors(
    names: Mapping[str, str], config: LlamaConfig
) -> tuple[dict[str, tuple[str, str]], dict[str, dict[str, str]]]:
    """Return (module -> (key of A, key of B), module -> kind -> key of another tensor), in the model's order.

    `names`: key -> name without prefixes. Raises AdapterError for a key of another kind and for A or B alone.
    """
    sides: dict[tuple[str, str], str] = {}
    modules = [*config.stored_modules(), *config.vocabulary_modules]
    known = set(modules)
    adapters: dict[str | None, str] = {}
    for key, name in names.items():
        module, side, adapter = _parsed(name)
        if module not in known:
            raise AdapterError(f"{WEIGHTS}: {_foreign_tensor(key, module or None, config)}")
        if module in config.vocabulary_modules and side not in ("A", "B"):
            raise AdapterError(
                f"{WEIGHTS}: tensor {name_of(key)} adapts {module}, for which only LoRA and trained rows are served, "
                f"without magnitudes (DoRA) and biases: {MERGE}, or train with exclude_modules={VOCABULARY_TARGETS}"
            )
        if (module, side) in sides:
            raise AdapterError(
                f"{WEIGHTS}: tensors {name_of(sides[module, side])} and {name_of(key)} are both {_spelled(side)} "
                f"of {module}, and nothing shows which one was trained: {AGAIN}"
            )
        sides[module, side] = key
        if side != "bias":  # a bias of the base, whose name has no adapter
            adapters[adapter] = key
    if len(adapters) > 1:
        one, other = list(adapters.values())[:2]
        raise AdapterError(
            f"{WEIGHTS}: tensors {name_of(one)} and {name_of(other)} are of adapters with different names: save each "
            "into a directory of its own with save_pretrained(selected_adapters=[NAME])"
        )
    if not sides:
        raise AdapterError(f"{WEIGHTS} holds no LoRA tensors: {AGAIN}")
    for module, side in sides:
        for other in () if side == "bias" else ("A", "B"):
            if (module, other) not in sides:
                raise AdapterError(f"{WEIGHTS}: {module} has {_spelled(side)} but no lora_{other}: {AGAIN}")
    pairs = {module: (sides[module, "A"], sides[module, "B"]) for module in modules if (module, "A") in sides}
    parts = {
        module: {kind: sides[module, kind] for kind in PART_OF if (module, kind) in sides}
        for module in modules
        if any((module, kind) in sides for kind in PART_OF)
    }
    return pairs, parts


def _parsed(key: str) -> tuple[str, str, str | None]:
    """Return (module, kind, adapter's name or None) of a tensor; ("", "", None) for a name of no kind."""
    for kind, pattern in _KEYS.items():
        match = pattern.fullmatch(key)
        if match is not None:
            kind = kind.removeprefix("embedding_")
            return match["module"], kind, match.groupdict().get("adapter")
    return "", "", None


def _spelled(kind: str) -> str:
    """Return a kind of tensor as files spell it."""
    return {"magnitude": "lora_magnitude_vector", "lora_bias": "lora_B.bias"}.get(
        kind, kind if kind == "bias" else f"lora_{kind}"
    )


def _foreign_tensor(key: str, module: str | None, config: LlamaConfig) -> str:
    """Return the error for a tensor that does not belong to an adapter of this base."""
    layer = re.match(r"model\.layers\.(\d+)\.", module or "")
    if layer and int(layer[1]) >= config.num_hidden_layers:
        return f"tensor {name_of(key)} is for layer {layer[1]} of {config.num_hidden_layers}: {_OTHER_BASE}"
    projection = (module or "").rpartition(".")[2]
    if layer and projection in _PROJECTIONS:
        own = dict.fromkeys(stored.rpartition(".")[2] for stored in config.stored_modules())
        return f"tensor {name_of(key)} adapts {projection}, but the base has {', '.join(own)}: {_OTHER_BASE}"
    return (
        f"tensor {name_of(key)} is not LoRA A or B of a projection of this base: {MERGE}, or use the base that it was "
        "trained on"
    )


def _check_rank(
    layout: Layout,
    module: str,
    names: tuple[str, str],
    config: LlamaConfig,
    settings: AdapterConfig,
    max_rank: int,
) -> int:
    """Return the module's rank, checked against the base, the config and the limit."""
    rank, stated = _check_shapes(layout, module, names, config), settings.rank_of(module)
    if rank != stated:
        raise AdapterError(
            f"{WEIGHTS}: {module} has rank {rank}, but adapter_config.json has {stated} (r or rank_pattern): the files "
            f"are of different adapters; {AGAIN}"
        )
    if rank > max_rank:
        raise AdapterError(f"{module} has rank {rank}, above the limit of {max_rank}: start with max_lora_rank={rank}")
    return rank


def _check_parts(
    layout: Layout, pairs: Mapping[str, object], parts: Mapping[str, Mapping[str, str]], config: LlamaConfig
) -> None:
    """Raise AdapterError for parts that do not fit the base or each other."""
    biased = config.biased_modules()
    for module, tensors in parts.items():
        (outputs, _), spelled = config.stored_shape(module), {kind: _spelled(kind) for kind in tensors}
        for kind, name in tensors.items():
            place = layout.places[name]
            if place.shape != (outputs,):
                raise AdapterError(
                    f"{WEIGHTS}: {module} has {spelled[kind]} {list(place.shape)}, expected [{outputs}], one value for "
                    f"each output of the base: {_OTHER_BASE}"
                )
            _check_dtype(name, place.dtype)
        if "magnitude" in tensors and "lora_bias" in tensors:
            raise AdapterError(
                f"{WEIGHTS}: {module} has {spelled['magnitude']} and {spelled['lora_bias']}, which PEFT does not "
                "define together: train with use_dora or lora_bias"
            )
        if "bias" in tensors and module not in biased:
            raise AdapterError(
                f"{WEIGHTS}: tensor {name_of(tensors['bias'])} is a trained bias, but the base has none there: "
                f"{_OTHER_BASE}"
            )


def _check_settings(
    settings: AdapterConfig,
    pairs: Mapping[str, object],
    parts: Mapping[str, Mapping[str, str]],
    config: LlamaConfig,
) -> None:
    """Raise AdapterError if adapter_config.json implies other parts than the file has."""
    biased = config.biased_modules()
    trained = {"none": set[str](), "all": set(biased), "lora_only": biased & pairs.keys()}[settings.bias]
    wanted = {
        "magnitude": (f"use_dora = {settings.use_dora}", set(pairs) if settings.use_dora else set()),
        "lora_bias": (f"lora_bias = {settings.lora_bias}", set(pairs) if settings.lora_bias else set()),
        "bias": (f"bias = {settings.bias!r}", trained),
    }
    for kind, (setting, modules) in wanted.items():
        present = {module for module, tensors in parts.items() if kind in tensors}
        for module in (*config.stored_modules(), *config.vocabulary_modules):
            if (module in modules) != (module in present):
                raise AdapterError(
                    f"{CONFIG} has {setting}, but {module} has {'a' if module in present else 'no'} {_spelled(kind)} "
                    f"in {WEIGHTS}: the files are of different adapters, or one was edited; {AGAIN}"
                )


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in ITEM_BYTES:
        raise AdapterError(
            f"{WEIGHTS}: tensor {name_of(name)} has dtype {value_of(dtype, _DTYPES)}, expected one of "
            f"{', '.join(ITEM_BYTES)}: save it unquantized"
        )


def _check_shapes(layout: Layout, module: str, names: tuple[str, str], config: LlamaConfig) -> int:
    """Return the module's rank. Raises AdapterError for shapes that do not fit the base, and unsupported dtypes."""
    outputs, inputs = config.stored_shape(module)
    shape_a, shape_b = (layout.places[name].shape for name in names)
    if len(shape_a) != 2 or len(shape_b) != 2 or shape_a[0] != shape_b[1]:
        raise AdapterError(
            f"{WEIGHTS}: {module} has A {list(shape_a)} and B {list(shape_b)}, expected [r, {inputs}] and "
            f"[{outputs}, r]: {AGAIN}"
        )
    if shape_a[1] != inputs or shape_b[0] != outputs:
        raise AdapterError(
            f"{WEIGHTS}: {module} maps {shape_a[1]} to {shape_b[0]} features, the base maps {inputs} to {outputs}: "
            f"{_OTHER_BASE}"
        )
    for name in names:
        _check_dtype(name, layout.places[name].dtype)
    return shape_a[0]


def _differences(settings: AdapterConfig, config: LlamaConfig, present: set[str]) -> tuple[str, ...]:
    """Return the contradictions between adapter_config.json's modules and the tensors, one line each."""
    try:
        modules = [*config.stored_modules(), *config.vocabulary_modules]
        if isinstance(settings.target_modules, str) and settings.target_modules.lower() == ALL_LINEAR:
            modules = config.stored_modules()  # as in PEFT: it leaves out the output head
        chosen = {module for module in modules if settings.targets_module(module)}
    except LookAroundError as problem:
        return (f"the modules that adapter_config.json targets are not compared with the tensors: {problem}",)
    found = []
    without = (chosen - present, "targeted by adapter_config.json have no tensors (served without LoRA)")
    beyond = (present - chosen, "have tensors and are not targeted by adapter_config.json (served with LoRA)")
    for surplus, text in (without, beyond):
        if surplus:
            ordered = [module for module in modules if module in surplus]
            found.append(
                f"{len(ordered)} modules {text}: {', '.join(ordered[:3])}{', ...' if len(ordered) > 3 else ''}"
            )
    return tuple(found)
