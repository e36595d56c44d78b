"""Op registration: one name, a plain-torch reference for the CPU, a launched kernel for CUDA.

`torch.library.Library` is used directly rather than `custom_op`: a call takes 1-3 us instead of 5-19 us.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

NAMESPACE = "sidestream"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Traits:
    """Properties of an op for cost estimates and drawings.

    kind     key of the cost model's table (`compiler/cost/kernel_costs.py`): kernels of a kind are about as efficient
    family   selects the op's colour in drawings
    gathers  name of an argument that is read only in part, such as an embedding table; "" for none
    """

    kind: str = "rows"
    family: str = "other"
    gathers: str = ""


@dataclass(frozen=True)
class Op:
    """One registered op.

    `reference` is the specification in plain torch; `fake` allocates the outputs (fake tensors while tracing, real
    ones before a launch); `launch(*args, out=..., sm_budget=None, pdl=False)` fills them on the GPU.
    """

    name: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    launch: Callable[..., None]
    mutates: tuple[str, ...]
    traits: Traits = Traits()

    @property
    def overload(self) -> torch._ops.OpOverload:
        """Return the callable in graphs: `torch.ops.sidestream.<name>.default`."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)


OPS: dict[str, Op] = {}


def as_outputs(result: Any) -> tuple[torch.Tensor, ...]:
    """Return an op's result as a tuple of tensors: () for None, one for a single tensor."""
    if result is None:
        return ()
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def register(
    name: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    launch: Callable[..., None],
    mutates: Iterable[str] = (),
    *,
    kind: str = "rows",
    family: str = "other",
    gathers: str = "",
) -> Op:
    """Define `sidestream::<name>`, with the schema from the annotations of `reference`.

    `mutates` names the arguments that the op writes in place. `kind`, `family` and `gathers` are the op's Traits.
    """
    mutated = tuple(mutates)
    schema = torch.library.infer_schema(reference, mutates_args=mutated)
    _LIBRARY.define(name + schema)

    def on_cuda(*args: Any) -> Any:
        result = fake(*args)
        launch(*args, out=as_outputs(result))
        return result

    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op = Op(name, reference, fake, launch, mutated, Traits(kind, family, gathers))
    OPS[name] = op
    return op
