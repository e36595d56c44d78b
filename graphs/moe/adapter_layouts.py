"""LoRA on routers and experts: modules of the graph for the names in a file, and the layouts of the tensors.

A layer has a router [E, H], and two stacks: `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]. For a stack of
[E, N, K] and rank r, a file has one of these layouts:

per expert  A [r, K] and B [N, r] for each expert and projection (`experts.3.up_proj`, in Mixtral `experts.3.w3`)
STACKED     A [E * r, K] and B [N, r * E], of `target_parameters` in PEFT from 0.19.1 on. In B's columns the expert is
            fastest. Gate and up share A.
TRANSPOSED  A [E * r, N] and B [K, r * E], of PEFT 0.17 to 0.19.0, which took the stack's dimensions as [E, in, out]

This file does not import torch, see `adapter_description`.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING

from ..adapter_config import CONFIG, AdapterConfig, AdapterError
from ..adapter_names import PEFT, TensorName
from ..config import LlamaConfig
from ..families import EXPERT_SPELLINGS, EXPERT_TARGETS, MLP_MODULES
from ..files.safetensors_header import Layout
from ..files.untrusted_files import name_of

if TYPE_CHECKING:
    import torch

STACKED, TRANSPOSED = "stacked", "transposed"
ROUTER, GATE_UP, DOWN = EXPERT_TARGETS
LINEARS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}
"""Stacks -> the projections of an expert in their rows."""
_TARGETS = {"gate_proj": GATE_UP, "up_proj": GATE_UP, "gate_up_proj": GATE_UP, "down_proj": DOWN}
_GRANITE = {"input_linear": GATE_UP, "output_linear": DOWN}
_OURS = {name: ours for _, names in EXPERT_SPELLINGS for name, ours in zip(names, MLP_MODULES, strict=True)}
_NAMES = re.compile(
    r"(?P<layer>model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.(?:"
    r"(?P<router>gate|router(?:\.layer)?)"
    rf"|experts\.(?P<expert>\d{{1,6}})\.(?P<linear>{'|'.join(_OURS)})"
    r"|(?P<stack>experts|experts\.base_layer|input_linear|output_linear))"
)
_GRAPH = re.compile(
    r"model\.layers\.(?P<layer>\d{1,6})\.mlp\."
    r"(?:gate|experts\.(?:(?P<expert>\d{1,6})\.)?(?P<linear>gate_proj|up_proj|gate_up_proj|down_proj))"
)
_ALL_AT_ONCE = re.compile(r".+\.experts\.(?:base_layer\.)?(?:gate_up_proj|gate_proj|up_proj|down_proj|w[123]|w13)")
_PARAMETERS = re.compile(
    r"(?:.*\.)?(?:(?:experts\.)?(?:gate_up_proj|down_proj)|(?:gate|router|router\.layer|input_linear|output_linear)\.weight)"
)
_RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:\.post\d+)?")
_OTHER_BASE = "the adapter was trained on another base; use that one"
_ONE_BY_ONE = "export one LoRA for each expert and projection (experts.0.up_proj.lora_A.weight), as PEFT names them"
_BARE = "LoRA on bare parameters is not supported{}: use target_modules on the projections"


def target_of(module: str) -> str:
    """Return the LoRA target of a module of the graph, or of one expert: `q_proj`, ..., or one of EXPERT_TARGETS."""
    name = module.rpartition(".")[2]
    return _TARGETS.get(name, name) if ".experts." in module else ROUTER if name == "gate" else name


def is_expert(module: str) -> bool:
    """Return whether a module is a stack of experts or a projection of one expert."""
    return target_of(module) in LINEARS


def is_stack(module: str) -> bool:
    """Return whether a module of the graph is a stack of all experts of a layer."""
    return module.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def is_sparse(module: str) -> bool:
    """Return whether a module is a router, a stack of experts or a projection of one expert."""
    return target_of(module) in EXPERT_TARGETS


def graph_modules(config: LlamaConfig) -> list[str]:
    """Return the full names of all routers and stacks of experts."""
    layers = [layer for layer in range(config.num_hidden_layers) if config.is_sparse(layer)]
    names = ("gate", "experts.gate_up_proj", "experts.down_proj")
    return [f"model.layers.{layer}.mlp.{name}" for layer in layers for name in names]


def expert_modules(config: LlamaConfig) -> Iterator[str]:
    """Yield the full names of the projections of each expert."""
    for stack in graph_modules(config):
        for linear in LINEARS.get(target_of(stack), ()):
            home = stack.rpartition(".")[0]
            yield from (f"{home}.{expert}.{linear}" for expert in range(config.num_experts))


def parts_of(config: LlamaConfig, module: str) -> list[tuple[str, int, int]]:
    """Return `config.parts_of`; stacks of experts are one part."""
    return [(module, 0, config.stored_shape(module)[0])] if is_stack(module) else config.parts_of(module)


def graph_name(name: TensorName) -> TensorName:
    """Return a tensor's name with the graph's name of a router or expert; others unchanged.

    A stack's parameter follows from its shapes, so its name ends with the module that had the parameter: `experts`,
    `experts.base_layer`, or in older Granite models `input_linear` and `output_linear`.
    """
    match = _NAMES.fullmatch(name.module)
    if match is None:
        return name
    home = f"{match['layer']}.mlp"
    if match["router"]:
        return name._replace(module=f"{home}.gate")
    if match["stack"]:
        return name._replace(module=f"{home}.{match['stack']}")
    return name._replace(module=f"{home}.experts.{int(match['expert'])}.{_OURS[match['linear']]}")


def matrix_shapes(a: tuple[int, ...], b: tuple[int, ...], experts: int, kind: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one expert's A [r, K] and B [N, r], for the tensors of a stack; () if there are none."""
    if len(a) != 2 or len(b) != 2 or a[0] % experts or b[1] % experts:
        return (), ()
    a, b = (a[0] // experts, a[1]), (b[0], b[1] // experts)
    return (a, b) if kind == STACKED else (b[::-1], a[::-1])


def holders(config: LlamaConfig) -> list[str]:
    """Return the modules that hold stacks as parameters, see `graph_name`."""
    homes = [module.removesuffix(".gate") for module in graph_modules(config) if module.endswith(".gate")]
    return [f"{home}.{name}" for home in homes for name in ("experts", "experts.base_layer", *_GRANITE)]


def sparse_problem(key: str, name: TensorName | None, shape: tuple[int, ...], config: LlamaConfig) -> str | None:
    """Return what is wrong with a tensor of a router or an expert; None for other tensors."""
    module = "" if name is None else name.module
    if _ALL_AT_ONCE.fullmatch(module):
        trainer = "SGLang's shared outer experts" if shape[:1] == (1,) else "SkyRL's export"
        return f"tensor {name_of(key)} has all experts in one tensor, as in {trainer}: {_ONE_BY_ONE}"
    match = _GRAPH.fullmatch(module)
    if match is None or not config.num_experts:
        return None
    layer = int(match["layer"])
    if layer < config.num_hidden_layers and not config.is_sparse(layer):
        return (
            f"tensor {name_of(key)} adapts an expert or router, but layer {layer} of the base has none: {_OTHER_BASE}"
        )
    if int(match["expert"] or 0) >= config.num_experts:
        return (
            f"tensor {name_of(key)} is for expert {match['expert']}, but the base has experts 0 to "
            f"{config.num_experts - 1}: {_OTHER_BASE}"
        )
    return None


def check_parameters(settings: AdapterConfig, config: LlamaConfig) -> None:
    """Raise AdapterError if `target_parameters` names others than stacks of experts and routers."""
    for parameter in settings.target_parameters:
        if not config.num_experts:
            raise AdapterError(f"{CONFIG}: target_parameters is set: {_BARE.format('')}")
        if not _PARAMETERS.fullmatch(parameter):
            only = ", except experts and routers"
            raise AdapterError(f"{CONFIG}: target_parameters names {name_of(parameter)}: {_BARE.format(only)}")


def find_stacks(
    layout: Layout, pairs: Mapping[str, tuple[str, str]], config: LlamaConfig, settings: AdapterConfig
) -> tuple[dict[str, str], str]:
    """Return the stack of each holder in `pairs`, by the tensors' shapes, and the layout: "" without holders.

    Where both layouts fit all tensors, `peft_version` decides. Raises AdapterError.
    """
    fits: dict[str, dict[str, str]] = {}  # holder -> layout -> stack
    for holder in set(holders(config)) & pairs.keys() if pairs else ():
        fits[holder] = _fits(layout, holder, pairs[holder], config)
    if not fits:
        return {}, ""
    common = [kind for kind in (STACKED, TRANSPOSED) if all(kind in found for found in fits.values())]
    if not common:
        raise AdapterError(
            f"{PEFT.weights}: the tensors of experts are in the layouts of two releases of peft: {PEFT.again}"
        )
    kind = common[0] if len(common) == 1 else _layout_of_release(settings.peft_version)
    stacks = {holder: fits[holder][kind] for holder in pairs if holder in fits}
    found = [*stacks.values(), *{_stack_of(module) for module in pairs if is_expert(module)}]
    for stack in found:
        if found.count(stack) > 1:
            raise AdapterError(
                f"{PEFT.weights} has LoRA on {stack} twice, and nothing shows which one was trained: {PEFT.again}"
            )
    return stacks, kind


def _stack_of(module: str) -> str:
    """Return the stack that has the rows of one expert's projection."""
    home = module.partition(".experts.")[0]
    return f"{home}.experts.{'gate_up_proj' if target_of(module) == GATE_UP else 'down_proj'}"


def _fits(layout: Layout, holder: str, names: tuple[str, str], config: LlamaConfig) -> dict[str, str]:
    """Return layout -> stack for A and B of a holder. Raises AdapterError if there is none."""
    a, b = (layout.places[name].shape for name in names)
    experts = config.num_experts
    home = f"{holder.partition('.mlp.')[0]}.mlp.experts"
    only = _GRANITE.get(holder.rpartition(".")[2])
    found: dict[str, str] = {}
    for kind, linear in product((STACKED, TRANSPOSED), ("gate_up_proj", "down_proj")):
        outputs, inputs = config.stored_shape(f"{home}.{linear}")
        one_a, one_b = matrix_shapes(a, b, experts, kind)
        if one_a[1:] == (inputs,) and one_b[:1] == (outputs,) and _TARGETS[linear] == (only or _TARGETS[linear]):
            found[kind] = f"{home}.{linear}"
    if found and a[0] == b[1] > 0:
        return found
    if len(a) == 3 or len(b) == 3:
        raise AdapterError(
            f"{PEFT.weights}: {holder} has A {list(a)} and B {list(b)}, a dimension for the experts as in exports of "
            f"SkyRL and Megatron, expected [{experts} * r, in] and [out, r * {experts}]: {_ONE_BY_ONE}"
        )
    hidden, width = config.hidden_size, config.expert_intermediate_size
    raise AdapterError(
        f"{PEFT.weights}: {holder} has A {list(a)} and B {list(b)}, but the base has {experts} experts with "
        f"gate_up_proj [{2 * width}, {hidden}] and down_proj [{hidden}, {width}], for A [{experts} * r, in] and "
        f"B [out, r * {experts}]: {_OTHER_BASE}"
    )


def _layout_of_release(version: str) -> str:
    """Return the layout that a release of PEFT writes. Raises AdapterError for versions without a known layout."""
    release = _RELEASE.fullmatch(version)
    if release is None:
        raise AdapterError(
            f"{PEFT.weights}: the tensors of experts fit the layouts of peft before and from 0.19.1 on, and "
            f"peft_version in {CONFIG} is not a release: save the adapter again with the release of peft that trained "
            "it, which writes its peft_version"
        )
    return STACKED if tuple(map(int, release.groups())) >= (0, 19, 1) else TRANSPOSED


def parameter_name(holder: str, stack: str) -> str:
    """Return the full name of a stack's parameter in the model that was trained, which patterns match."""
    module = holder.removesuffix(".base_layer")
    return f"{module}.weight" if module.endswith(tuple(_GRANITE)) else f"{module}.{stack.rpartition('.')[2]}"


def experts_without(settings: AdapterConfig, config: LlamaConfig, present: Collection[str]) -> Iterator[str]:
    """Yield a line if LoRA on single experts leaves out others of the layers that adapter_config.json chooses."""
    single = [module for module in present if is_expert(module) and not is_stack(module)]
    linears = {module.rpartition(".")[2] for module in single}
    homes = {module.partition(".experts.")[0] for module in single}
    wanted = [
        module
        for module in (expert_modules(config) if single else ())
        if module.rpartition(".")[2] in linears
        and (settings.layers_to_transform in (None, []) or module.partition(".experts.")[0] in homes)
    ]
    absent = [module for module in wanted if module not in present]
    if absent:
        yield (
            f"{len(absent)} of {len(wanted)} projections of experts have no tensors (served without LoRA): "
            f"{', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''}"
        )


def unpacked(a: "torch.Tensor", b: "torch.Tensor", experts: int, kind: str) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return views A [E, r, K] and B [E, N, r] of a stack's tensors in the layout `kind`."""
    a = a.reshape(experts, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    return (a, b) if kind == STACKED else (b.transpose(1, 2), a.transpose(1, 2))
