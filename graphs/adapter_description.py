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
from .families import ATTENTION_MODULES, MLP_MODULES, PACKED_MODULES
from .model_directory import WEIGHTS, missing_adapter
from .peft_patterns import ALL_LINEAR, LookAroundError
from .safetensors_header import ITEM_BYTES, Layout, read_layout
from .untrusted_files import name_of, value_of

AGAIN = "save the adapter again with peft's save_pretrained"
MERGE = "merge the adapter into its base (merge_and_unload) and serve that"
_TENSORS_PER_MODULE = 3  # A, B, and one unsupported tensor, so that the error can name it
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[A-Za-z0-9_-]{1,128}))?\.weight")
_WRAPPERS = re.compile(r"(?<![^.])(?:base_model\.model|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Prefixes that PEFT, torch.compile and FSDP add to module names, once or several times."""
_OTHER_BASE = "the adapter was trained on another base; use that one"
_PROJECTIONS = (*ATTENTION_MODULES, *MLP_MODULES, *PACKED_MODULES)
_EMBEDDING_LORA = re.compile(r"(?<=\.lora_)embedding_(?P<side>[AB](?:\.[A-Za-z0-9_-]{1,128})?)$")
_DTYPES = ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "U16", "I32", "U32", "I64", "U64", "F64")


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter without its values.

    layout        header of the weights' file
    pairs         stored module (`model.layers.0.self_attn.q_proj`; in packed checkpoints `...qkv_proj`) ->
                  (tensor name of A, tensor name of B), in the model's order
    scaling       module -> factor of B A
    settings_sum  sha256 (hex) of adapter_config.json's settings
    differences   contradictions between the tensors and adapter_config.json (the tensors are served)
    vocabulary    tensors of the embedding and the output head that are not LoRA
    """

    layout: Layout
    pairs: dict[str, tuple[str, str]]
    scaling: dict[str, float]
    settings_sum: str
    differences: tuple[str, ...] = ()
    vocabulary: VocabularyTensors = VocabularyTensors()

    def rank(self, module: str) -> int:
        """Return the module's rank: the number of rows of its A."""
        return self.layout.places[self.pairs[module][0]].shape[0]

    def check(self, config: LlamaConfig, max_rank: int) -> None:
        """Raise ValueError unless this is a valid adapter of the base; call it on descriptions from another process."""
        modules = {*config.stored_modules(), *config.vocabulary_modules}
        self.vocabulary.check(self.layout, config)
        for module, names in self.pairs.items():
            if module not in modules or not all(name in self.layout.places for name in names):
                raise ValueError("a module or tensor that does not exist")
            if _check_shapes(self.layout, module, names, config) > max_rank:
                raise ValueError("a rank above the limit")
            if not all(self.layout.is_inside_file(name) for name in names):
                raise ValueError("a tensor outside of the file")
        tensors = 2 * len(self.pairs) + len(self.vocabulary)
        if not self.pairs or self.scaling.keys() != self.pairs.keys() or tensors != len(self.layout.places):
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
    biases = {f".{name}" for name in config.biases}
    settings.check_biases([each for each in config.stored_modules() if each[each.rindex(".") :] in biases])
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
    pairs = _pairs(names, config, vocabulary)
    ranks = {module: _check_rank(layout, module, names, config, settings, max_rank) for module, names in pairs.items()}
    return Description(
        layout=layout,
        pairs=pairs,
        scaling={module: settings.scaling(module, rank) for module, rank in ranks.items()},
        settings_sum=hashlib.sha256(settings.text.encode()).hexdigest(),
        differences=_differences(settings, config, set(pairs)),
        vocabulary=vocabulary,
    )


def _pairs(names: Mapping[str, str], config: LlamaConfig, vocabulary: VocabularyTensors) -> dict[str, tuple[str, str]]:
    """Return module -> (key of A, key of B), in the model's order. Raises AdapterError for a key without a pair."""
    sides: dict[tuple[str, str], str] = {}
    modules = (*config.stored_modules(), *config.vocabulary_modules)
    known = set(modules)
    adapters: dict[str | None, str] = {}
    others = {*vocabulary.copies, *(tokens.tensor for tokens in vocabulary.tokens.values())}
    for key, name in names.items():
        if key in others:
            continue
        match = _KEY.fullmatch(_EMBEDDING_LORA.sub(r"\g<side>.weight", name))
        if match is None or match["module"] not in known:
            raise AdapterError(f"{WEIGHTS}: {_foreign_tensor(key, match['module'] if match else None, config)}")
        module, side = match["module"], match["side"]
        if (module, side) in sides:
            raise AdapterError(
                f"{WEIGHTS}: tensors {name_of(sides[module, side])} and {name_of(key)} are both lora_{side} "
                f"of {module}, and nothing shows which one was trained: {AGAIN}"
            )
        sides[module, side] = key
        adapters[match["adapter"]] = key
    if len(adapters) > 1:
        one, other = list(adapters.values())[:2]
        raise AdapterError(
            f"{WEIGHTS}: tensors {name_of(one)} and {name_of(other)} are of adapters with different names: save each "
            "into a directory of its own with save_pretrained(selected_adapters=[NAME])"
        )
    if not sides:
        raise AdapterError(f"{WEIGHTS} holds no LoRA tensors: {AGAIN}")
    for module, side in sides:
        other = "B" if side == "A" else "A"
        if (module, other) not in sides:
            raise AdapterError(f"{WEIGHTS}: {module} has lora_{side} but no lora_{other}: {AGAIN}")
    return {module: (sides[module, "A"], sides[module, "B"]) for module in modules if (module, "A") in sides}


def _foreign_tensor(key: str, module: str | None, config: LlamaConfig) -> str:
    """Return the error for a tensor that does not belong to an adapter of this base."""
    if "lora_magnitude_vector" in key:
        return (
            f"tensor {name_of(key)} belongs to DoRA, which is not supported: merge the adapter into its base, or train "
            "with use_dora=False"
        )
    if ".lora_" in key and key.endswith(".bias"):
        return f"tensor {name_of(key)} is a LoRA bias, which is not supported: train with lora_bias=False, or {MERGE}"
    if key.endswith(".bias"):
        return (
            f"tensor {name_of(key)} is a trained bias of the base, which an adapter cannot change here: {MERGE}, or "
            "train with bias='none'"
        )
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
        dtype = layout.places[name].dtype
        if dtype not in ITEM_BYTES:
            raise AdapterError(
                f"{WEIGHTS}: tensor {name_of(name)} has dtype {value_of(dtype, _DTYPES)}, expected one of "
                f"{', '.join(ITEM_BYTES)}: save it unquantized"
            )
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
