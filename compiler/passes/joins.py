"""Where a LoRA delta joins its linear: consumers take the pair, so that the base GEMM never waits for the side
stream.
"""

from torch import fx

from ...ops.lora.lora import lora
from ..graph.nodes import args_of, aten, is_call, through_views


def split_delta(value: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """`linear + lora` as (linear, lora); any other node as (node, None)."""
    if is_call(value, aten.add.Tensor):
        for base, delta in (args_of(value), args_of(value)[::-1]):
            if is_call(through_views(delta), lora):
                return base, delta
    return value, None
