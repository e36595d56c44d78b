"""Config and header of a PEFT adapter, checked against the base: everything needed to read its tensors.

This file does not import torch, so that a small separate process can check adapters for a GPU process.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from .adapter_config import CONFIG, MAX_INVOCATION, MAX_RANK, AdapterConfig, AdapterError
from .adapter_names import MLX, PEFT, AdapterFormat, TensorName, exporter_problem, plain_name, tensor_name
from .adapter_vocabulary import MAX_VOCABULARY_TENSORS, VocabularyTensors, find_vocabulary
from .config import LlamaConfig
from .families import ADAPTER_PARTS, ATTENTION_MODULES, MLP_MODULES, PACKED_MODULES, VOCABULARY_TARGETS
from .files.safetensors_header import ITEM_BYTES, Layout, read_config, read_layout
from .files.untrusted_files import name_of, value_of
from .ia3 import INPUTS, OUTPUTS, VECTOR, check_method, place_of, vector_shape
from .model_directory import missing_adapter
from .moe.adapter_layouts import (
    ROUTER,
    STACKED,
    TRANSPOSED,
    check_parameters,
    expert_modules,
    experts_without,
    find_stacks,
    graph_modules,
    graph_name,
    holders,
    is_expert,
    is_sparse,
    is_stack,
    matrix_shapes,
    parameter_name,
    sparse_problem,
    target_of,
)
from .peft_patterns import ALL_LINEAR, LookAroundError

UPDATE = Path("tensors")
"""Name of an update's tensors in errors, in place of a file's."""
AGAIN_FROM_MEMORY = "give tensors as peft's get_peft_model_state_dict returns them, and the adapter's config"
MERGE = "merge the adapter into its base (merge_and_unload) and serve that"
_TENSORS_PER_MODULE = 6  # A, B, parts, and unsupported tensors, so that the error can name them
_TENSORS_PER_EXPERT_MODULE = 3
_KINDS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
    "lora_magnitude_vector": "magnitude",
    "lora_B.bias": "lora_bias",
    "bias": "bias",
    VECTOR: OUTPUTS,
}
"""Names of an adapter's tensors in their module -> kinds."""
_SPELLED = {kind: name.removesuffix(".weight") for name, kind in reversed(_KINDS.items())} | {INPUTS: VECTOR}
PART_OF = {"magnitude": "dora", "lora_bias": "bias", "bias": "bias", OUTPUTS: "ia3", INPUTS: "ia3"}
"""Kinds of tensors besides A and B -> the part of an adapter (ADAPTER_PARTS) to which they belong."""
_OTHER_BASE = "the adapter was trained on another base; use that one"
_PROJECTIONS = (*ATTENTION_MODULES, *MLP_MODULES, *PACKED_MODULES)
_DTYPES = ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "U16", "I32", "U32", "I64", "U64", "F64")


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter without its values.

    layout        header of the weights' file
    pairs         stored module (`model.layers.0.self_attn.q_proj`; in packed checkpoints `...qkv_proj`) ->
                  (tensor name of A, tensor name of B), in the model's order
    scaling       module -> factor of B A
    parts         module -> kind of tensor (a key of PART_OF) -> tensor name; also modules without LoRA, as of IA3
    settings_sum  sha256 (hex) of adapter_config.json's settings
    invocation    token ids from whose last occurrence in a prompt on the adapter is active; (): always
    differences   contradictions between the tensors and adapter_config.json (the tensors are served)
    mlx           whether the files are mlx_lm's: A [in, r] and B [r, out]
    vocabulary    tensors of the embedding and the output head that are not LoRA
    stacked       layout of stacks in `pairs` that hold all experts: STACKED or TRANSPOSED; "": there are none
    """

    layout: Layout
    pairs: dict[str, tuple[str, str]]
    scaling: dict[str, float]
    settings_sum: str
    differences: tuple[str, ...] = ()
    parts: dict[str, dict[str, str]] = {}
    mlx: bool = False
    invocation: tuple[int, ...] = ()
    vocabulary: VocabularyTensors = VocabularyTensors()
    stacked: str = ""

    @property
    def form(self) -> AdapterFormat:
        """The trainer's format."""
        return MLX if self.mlx else PEFT

    def kinds(self, config: LlamaConfig) -> tuple[str, ...]:
        """Return the adapter's parts besides LoRA, of ADAPTER_PARTS. IA3 multiplies biases, too."""
        found = {PART_OF[kind] for tensors in self.parts.values() for kind in tensors}
        if "ia3" in found and config.biased_modules() & self.parts.keys():
            found.add("bias")
        return tuple(part for part in ADAPTER_PARTS if part in found)

    @property
    def modules(self) -> list[str]:
        """Modules with LoRA or parts, those with LoRA first."""
        return list(dict.fromkeys([*self.pairs, *self.parts]))

    def names_of(self, module: str) -> list[str]:
        """Return the names of a module's tensors."""
        return [*self.pairs.get(module, ()), *self.parts.get(module, {}).values()]

    def rank(self, module: str, config: LlamaConfig) -> int:
        """Return the module's rank."""
        return _shapes(self.layout, module, self.pairs[module], config, self.form, self.stacked)[0][0]

    def check(self, config: LlamaConfig, max_rank: int) -> None:
        """Raise ValueError unless this is a valid adapter of the base; call it on descriptions from another process."""
        self.vocabulary.check(self.layout, config)
        modules, count = {*_lora_modules(config), *graph_modules(config)}, len(self.vocabulary)
        if self.stacked not in ("", STACKED, TRANSPOSED):
            raise ValueError("a layout that does not exist")
        kinds = {kind for tensors in self.parts.values() for kind in tensors}
        if not kinds <= PART_OF.keys() or not (self.pairs or kinds & {OUTPUTS, INPUTS}):
            raise ValueError("a kind of tensor that does not exist, or neither LoRA nor IA3")
        for module in self.modules:
            names = self.names_of(module)
            if module not in modules or not all(name in self.layout.places for name in names):
                raise ValueError("a module or tensor that does not exist")
            if not all(self.layout.is_inside_file(name) for name in names):
                raise ValueError("a tensor outside of the file")
            count += len(names)
        for module, pair in self.pairs.items():
            if _check_shapes(self.layout, module, pair, config, self.form, self.stacked) > max_rank:
                raise ValueError("a rank above the limit")
        _check_parts(self.layout, self.parts, config, self.form)
        if self.scaling.keys() != self.pairs.keys() or count != len(self.layout.places):
            raise ValueError("modules and tensors that do not match")
        if not all(math.isfinite(scale) for scale in self.scaling.values()):
            raise ValueError("a scaling that is not a finite number")
        if len(self.invocation) > MAX_INVOCATION or not all(0 <= each < config.vocab_size for each in self.invocation):
            raise ValueError("an invocation that is too long or has a token that does not exist")


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
        only_a_pickle = not (directory / PEFT.weights).exists() and (directory / "adapter_model.bin").exists()
    except OSError as problem:
        remedy = "check the path's length and permissions"
        raise AdapterError(f"its directory cannot be read ({problem.strerror}): {remedy}") from None
    if reason is not None:
        raise AdapterError(reason)
    settings = AdapterConfig.from_directory(directory, lenient, roots)
    settings.check_invocation(config.vocab_size)
    if only_a_pickle:
        raise AdapterError(
            "adapter_model.bin is a pickle, which can run code and is never loaded: save the adapter again with "
            "save_pretrained(safe_serialization=True)"
        )
    check_parameters(settings, config)
    weights, form = directory / settings.form.weights, settings.form
    layout = read_layout(weights, AdapterError, form.again, _max_tensors(config), roots, foreign=_OTHER_BASE)
    return _describe(settings, layout, config, max_rank)


def describe_update(handle: int, config: LlamaConfig, max_rank: int, lenient: bool = False) -> Description:
    """Describe an adapter in an open file with tensors and config (`read_config`), as `describe_adapter` does."""
    layout = read_layout(
        UPDATE, AdapterError, AGAIN_FROM_MEMORY, _max_tensors(config), foreign=_OTHER_BASE, opened=handle
    )
    try:
        fields = read_config(handle, layout)
    except ValueError as problem:
        raise AdapterError(f"{UPDATE.name}: {problem}: {AGAIN_FROM_MEMORY}") from None
    settings = AdapterConfig.from_dict(fields, lenient)
    if settings.form is not PEFT:
        raise AdapterError(f"config is not PEFT's: {AGAIN_FROM_MEMORY}")
    settings.check_invocation(config.vocab_size)
    check_parameters(settings, config)
    return _describe(settings, layout, config, max_rank)


def _max_tensors(config: LlamaConfig) -> int:
    """Return the largest number of tensors of an adapter."""
    # unpacked modules also of a packed base: the error names tensors of an unpacked adapter
    most = _TENSORS_PER_MODULE * len(config.linear_modules()) + MAX_VOCABULARY_TENSORS
    return most + _TENSORS_PER_EXPERT_MODULE * sum(1 for _ in expert_modules(config))


def _describe(settings: AdapterConfig, layout: Layout, config: LlamaConfig, max_rank: int) -> Description:
    """Return the description of an adapter with a checked config."""
    form = settings.form
    names = {key: plain_name(key) for key in layout.places if any(each in key for each in VOCABULARY_TARGETS)}
    vocabulary = find_vocabulary(layout, names, config, settings)
    taken = set(vocabulary.names)
    pairs, parts, trained = _tensors(layout, [key for key in layout.places if key not in taken], config, settings)
    stacks, stacked = find_stacks(layout, pairs, config, settings)
    for holder, stack in stacks.items():
        trained[stack] = parameter_name(trained[holder], stack)
    pairs = {stacks.get(module, module): names for module, names in pairs.items()}
    for module in pairs:
        if target_of(module) == ROUTER and settings.targets_parameter(f"{trained[module]}.weight"):
            trained[module] += ".weight"
    ranks = {
        module: _check_rank(layout, module, names, config, settings, max_rank, trained[module], stacked)
        for module, names in pairs.items()
    }
    _check_parts(layout, parts, config, form)
    _check_settings(settings, pairs, parts, config)
    lora = [module for module in pairs if module in config.vocabulary_modules]
    others = [*parts, *lora, *vocabulary.tokens, *settings.modules_to_save]
    if settings.invocation and others:
        raise AdapterError(
            f"{CONFIG}: an adapter with alora_invocation_tokens can only have plain LoRA on the layers' projections, "
            f"but this one also has other tensors of {name_of(others[0])}: train it without DoRA, biases and the "
            "embedding"
        )
    if settings.invocation and (parameters := [*settings.target_parameters, *stacks.values()]):
        raise AdapterError(
            f"{CONFIG}: alora_invocation_tokens is not supported with LoRA on the parameter {name_of(parameters[0])}, "
            "which PEFT applies to all tokens or refuses: train it without target_parameters, or without "
            "alora_invocation_tokens"
        )
    compared = trained if settings.ia3 else {module: trained[module] for module in pairs}
    return Description(
        layout=layout,
        pairs=pairs,
        scaling={module: settings.scaling(trained[module], rank) for module, rank in ranks.items()},
        settings_sum=hashlib.sha256(f"{settings.identity}{'mlx' if form is MLX else ''}{stacked}".encode()).hexdigest(),
        differences=() if form is MLX else _differences(settings, config, compared),
        parts=parts,
        mlx=form is MLX,
        invocation=settings.invocation,
        vocabulary=vocabulary,
        stacked=stacked,
    )


def _lora_modules(config: LlamaConfig) -> list[str]:
    """Return the full names of the stored modules that may have LoRA; of experts their projections, not the stacks."""
    routers = [module for module in graph_modules(config) if target_of(module) == ROUTER]
    return [*config.stored_modules(), *config.vocabulary_modules, *routers, *expert_modules(config)]


def _tensors(
    layout: Layout, keys: Iterable[str], config: LlamaConfig, settings: AdapterConfig
) -> tuple[dict[str, tuple[str, str]], dict[str, dict[str, str]], dict[str, str]]:
    """Return module -> (key of A, key of B), module -> kind -> key of another tensor, both in the model's order.

    The third is module -> its name in the trained model. Stacks of experts have the names of `holders`. Raises
    AdapterError for a key of another kind and for A or B alone.
    """
    sides: dict[tuple[str, str], str] = {}
    form = settings.form
    modules = [*_lora_modules(config), *(holders(config) if form is PEFT else ())]
    known, sparse = set(modules), {*modules} - {*config.stored_modules(), *config.vocabulary_modules}
    trained: dict[str, str] = {}
    adapters: dict[str | None, str] = {}
    for key in keys:
        name = tensor_name(key, form)
        if name is not None and config.num_experts:
            name = graph_name(name)
        side = None if name is None else _KINDS.get(name.part)
        if name is None or side is None or name.module not in known:
            raise AdapterError(f"{form.weights}: {_foreign_tensor(key, layout, name, config, form)}")
        module = name.module
        check_method(key, side, settings)
        if module in sparse and side not in ("A", "B"):
            raise AdapterError(
                f"{form.weights}: tensor {name_of(key)} is of a router or expert, for which only LoRA is served, "
                f"without magnitudes (DoRA), biases and IA3: {MERGE}, or train LoRA without use_dora and lora_bias"
            )
        if module in config.vocabulary_modules and side not in ("A", "B"):
            raise AdapterError(
                f"{form.weights}: tensor {name_of(key)} adapts {module}, for which only LoRA and trained rows are "
                f"served, without magnitudes (DoRA), biases and IA3: {MERGE}, or train with "
                f"exclude_modules={VOCABULARY_TARGETS}"
            )
        trained[module] = name.trained
        if side == OUTPUTS:
            module, side = place_of(key, name, layout.places[key].shape, config, settings)
        if (module, side) in sides:
            raise AdapterError(
                f"{form.weights}: tensors {name_of(sides[module, side])} and {name_of(key)} are both {_SPELLED[side]} "
                f"of {module}, and nothing shows which one was trained: {form.again}"
            )
        sides[module, side] = key
        if side != "bias":  # a bias of the base, whose name has no adapter
            adapters[name.adapter] = key
    if len(adapters) > 1:
        one, other = list(adapters.values())[:2]
        raise AdapterError(
            f"{form.weights}: tensors {name_of(one)} and {name_of(other)} are of adapters with different names: save "
            "each into a directory of its own with save_pretrained(selected_adapters=[NAME])"
        )
    if not sides:
        raise AdapterError(f"{form.weights} holds no {settings.method} tensors: {form.again}")
    for module, side in sides:
        for other in () if side in ("bias", OUTPUTS, INPUTS) else ("A", "B"):
            if (module, other) not in sides:
                raise AdapterError(f"{form.weights}: {module} has {_SPELLED[side]} but no lora_{other}: {form.again}")
    pairs = {module: (sides[module, "A"], sides[module, "B"]) for module in modules if (module, "A") in sides}
    parts = {
        module: {kind: sides[module, kind] for kind in PART_OF if (module, kind) in sides}
        for module in modules
        if any((module, kind) in sides for kind in PART_OF)
    }
    return pairs, parts, trained


def _foreign_tensor(key: str, layout: Layout, name: TensorName | None, config: LlamaConfig, form: AdapterFormat) -> str:
    """Return the error for a tensor that does not belong to an adapter of this base."""
    problem = exporter_problem(key, form) or sparse_problem(key, name, layout.places[key].shape, config)
    if problem is not None:
        return problem
    module = name.module if name is not None else ""
    layer = re.match(r"model\.layers\.(\d{1,9})\.", module)
    if layer and int(layer[1]) >= config.num_hidden_layers:
        return f"tensor {name_of(key)} is for layer {layer[1]} of {config.num_hidden_layers}: {_OTHER_BASE}"
    projection = module.rpartition(".")[2]
    own = dict.fromkeys(stored.rpartition(".")[2] for stored in config.stored_modules())
    if layer and projection in _PROJECTIONS and projection not in own:
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
    trained: str,
    stacked: str,
) -> int:
    """Return the module's rank, checked against the base, the config and the limit. `trained`: as in `TensorName`."""
    form = settings.form
    rank, stated = _check_shapes(layout, module, names, config, form, stacked), settings.rank_of(trained)
    if rank != stated:
        field = "lora_parameters.rank" if form is MLX else "r or rank_pattern"
        raise AdapterError(
            f"{form.weights}: {module} has rank {rank}, but adapter_config.json has {stated} ({field}): the files "
            f"are of different adapters; {form.again}"
        )
    if rank > MAX_RANK:
        raise AdapterError(f"{module} has rank {rank}; at most {MAX_RANK} is supported: {MERGE}")
    if rank > max_rank:
        option = "max_expert_rank" if is_expert(module) else "max_lora_rank"
        raise AdapterError(f"{module} has rank {rank}, above the limit of {max_rank}: start with {option}={rank}")
    return rank


def _check_parts(
    layout: Layout, parts: Mapping[str, Mapping[str, str]], config: LlamaConfig, form: AdapterFormat
) -> None:
    """Raise AdapterError for parts that do not fit the base or each other."""
    biased = config.biased_modules()
    for module, tensors in parts.items():
        (outputs, _), spelled = config.stored_shape(module), {kind: _SPELLED[kind] for kind in tensors}
        for kind, name in tensors.items():
            place = layout.places[name]
            expected = vector_shape(kind, module, config) if PART_OF[kind] == "ia3" else (outputs,)
            if place.shape != expected:
                raise AdapterError(
                    f"{form.weights}: {module} has {spelled[kind]} {list(place.shape)}, expected {list(expected)}, a "
                    f"value for each output of the base: {_OTHER_BASE}"
                )
            _check_dtype(name, place.dtype, form)
        if "magnitude" in tensors and "lora_bias" in tensors:
            raise AdapterError(
                f"{form.weights}: {module} has {spelled['magnitude']} and {spelled['lora_bias']}, which PEFT does not "
                "define together: train with use_dora or lora_bias"
            )
        if "bias" in tensors and module not in biased:
            raise AdapterError(
                f"{form.weights}: tensor {name_of(tensors['bias'])} is a trained bias, but the base has none there: "
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
        for module in dict.fromkeys((*config.stored_modules(), *config.vocabulary_modules, *pairs)):
            if (module in modules) != (module in present):
                raise AdapterError(
                    f"{CONFIG} has {setting}, but {module} has {'a' if module in present else 'no'} {_SPELLED[kind]} "
                    f"in {settings.form.weights}: the files are of different adapters, or one was edited; "
                    f"{settings.form.again}"
                )


def _check_dtype(name: str, dtype: str, form: AdapterFormat) -> None:
    if dtype not in ITEM_BYTES:
        raise AdapterError(
            f"{form.weights}: tensor {name_of(name)} has dtype {value_of(dtype, _DTYPES)}, expected one of "
            f"{', '.join(ITEM_BYTES)}: save it unquantized"
        )


def _shapes(
    layout: Layout, module: str, names: tuple[str, str], config: LlamaConfig, form: AdapterFormat, stacked: str
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of A [r, in] and B [out, r]; of one expert for a stack of experts."""
    a, b = (layout.places[name].shape for name in names)
    if is_stack(module):
        return matrix_shapes(a, b, config.num_experts, stacked)
    return (a[::-1], b[::-1]) if form.transposed else (a, b)


def _check_shapes(
    layout: Layout, module: str, names: tuple[str, str], config: LlamaConfig, form: AdapterFormat, stacked: str
) -> int:
    """Return the module's rank. Raises AdapterError for shapes that do not fit the base, and unsupported dtypes."""
    outputs, inputs = config.stored_shape(module)
    shape_a, shape_b = _shapes(layout, module, names, config, form, stacked)
    if len(shape_a) != 2 or len(shape_b) != 2 or shape_a[0] != shape_b[1]:
        raise AdapterError(
            f"{form.weights}: {module} has A {list(shape_a)} and B {list(shape_b)}, expected [r, {inputs}] and "
            f"[{outputs}, r]: {form.again}"
        )
    if shape_a[1] != inputs or shape_b[0] != outputs:
        raise AdapterError(
            f"{form.weights}: {module} maps {shape_a[1]} to {shape_b[0]} features, the base maps {inputs} to "
            f"{outputs}: {_OTHER_BASE}"
        )
    for name in names:
        _check_dtype(name, layout.places[name].dtype, form)
    return shape_a[0]


def _differences(settings: AdapterConfig, config: LlamaConfig, trained: Mapping[str, str]) -> tuple[str, ...]:
    """Return the contradictions between adapter_config.json's modules and the tensors, one line each.

    `trained`: the modules with tensors -> their names in the trained model.
    """
    present = trained.keys()
    if settings.ia3 and not settings.target_modules:  # PEFT's defaults for the model
        return ()
    try:
        modules = [*config.stored_modules(), *config.vocabulary_modules, *graph_modules(config)]
        modules = list(dict.fromkeys((*modules, *present)))
        if isinstance(settings.target_modules, str) and settings.target_modules.lower() == ALL_LINEAR:
            # as in PEFT: it leaves out the output head, and some releases routers and experts
            modules = [*config.stored_modules(), *filter(is_sparse, present)]
        chosen = {each for each in modules if _is_targeted(settings, each, trained.get(each, each))}
    except LookAroundError as problem:
        return (f"the modules that adapter_config.json targets are not compared with the tensors: {problem}",)
    found = list(experts_without(settings, config, present))
    without = (chosen - present, f"targeted by adapter_config.json have no tensors (served without {settings.method})")
    beyond = (
        present - chosen,
        f"have tensors and are not targeted by adapter_config.json (served with {settings.method})",
    )
    for surplus, text in (without, beyond):
        if surplus:
            ordered = [module for module in modules if module in surplus]
            found.append(
                f"{len(ordered)} modules {text}: {', '.join(ordered[:3])}{', ...' if len(ordered) > 3 else ''}"
            )
    return tuple(found)


def _is_targeted(settings: AdapterConfig, module: str, name: str) -> bool:
    """Return whether adapter_config.json applies LoRA to `module`, which is called `name` in the trained model."""
    if is_sparse(module) and any(map(settings.targets_parameter, (name, f"{name}.weight"))):
        return True
    return not is_stack(module) and settings.targets_module(name)
