"""Tensors of IA3 (arXiv 2205.05638): a vector for each target, by which its outputs or its inputs are multiplied.

Factors of outputs are a gain, as DoRA has one. The inputs of down_proj are silu(gate) * up, so factors of these inputs
are factors of the outputs of up_proj. Factors of other inputs are refused: programs have no place for them. This file
does not import torch, see `adapter_description`.
"""

from .adapter_config import CONFIG, AdapterConfig, AdapterError
from .adapter_names import TensorName
from .config import LlamaConfig
from .files.untrusted_files import name_of

OUTPUTS, INPUTS = "ia3", "ia3_inputs"
"""Kinds of vectors; those of inputs are kept under the module that has these as its outputs."""
FACTORS, BIASED_FACTORS = "ia3", "ia3_biased"
"""Kinds of an adapter's factors [N] of a projection's outputs, without and with a bias in the base."""
VECTOR = "ia3_l"
_FEEDFORWARD = "down_proj"
_PRODUCERS = ("up_proj", "gate_up_proj")
_OTHER_BASE = "the adapter was trained on another base; use that one"


def check_method(key: str, kind: str, settings: AdapterConfig) -> None:
    """Raise AdapterError if the tensor `key` is of IA3 and adapter_config.json is not, or the other way round."""
    if (kind == OUTPUTS) != settings.ia3:
        raise AdapterError(
            f"{settings.form.weights}: tensor {name_of(key)} is not of {settings.method}, which peft_type in {CONFIG} "
            f"names: the files are of different adapters; {settings.form.again}"
        )


def place_of(
    key: str, name: TensorName, shape: tuple[int, ...], config: LlamaConfig, settings: AdapterConfig
) -> tuple[str, str]:
    """Return (stored module whose outputs the vector `key` multiplies, its kind).

    The shape tells whether it is of outputs or inputs, and adapter_config.json must agree. Raises AdapterError.
    """
    outputs, inputs = config.stored_shape(name.module)
    target = name.module.rpartition(".")[2]
    weights = settings.form.weights
    if shape not in ((outputs, 1), (1, inputs)):
        raise AdapterError(
            f"{weights}: tensor {name_of(key)} has shape {list(shape)}, expected [{outputs}, 1], or [1, {inputs}] for "
            f"a target in feedforward_modules: {_OTHER_BASE}"
        )
    of_inputs, stated = shape == (1, inputs), settings.scales_inputs(name.trained)
    if stated is not None and stated != of_inputs:
        raise AdapterError(
            f"{weights}: tensor {name_of(key)} has factors of the {'inputs' if of_inputs else 'outputs'} of {target}, "
            f"but feedforward_modules in {CONFIG} {'includes' if stated else 'does not include'} it: the files are of "
            f"different adapters; {settings.form.again}"
        )
    if not of_inputs:
        return name.module, OUTPUTS
    if target != _FEEDFORWARD:
        raise AdapterError(
            f"{weights}: tensor {name_of(key)} has factors of the inputs of {target}; only those of {_FEEDFORWARD} are "
            f"supported: train with feedforward_modules=['{_FEEDFORWARD}'], or merge the adapter into its base "
            "(merge_and_unload) and serve that"
        )
    producer = _PRODUCERS[config.packed_checkpoint]
    return f"{name.module.removesuffix(target)}{producer}", INPUTS


def vector_shape(kind: str, module: str, config: LlamaConfig) -> tuple[int, ...]:
    """Return the shape of a vector that is kept under `module`; () if the module cannot have one of this kind."""
    if kind == OUTPUTS:
        return config.stored_shape(module)[0], 1
    return (1, config.intermediate_size) if module.rpartition(".")[2] in _PRODUCERS else ()
