"""Meaning of the dimensions of graph inputs, and their static sizes in a bucket.

The engine's inputs are identified by name: `block_table` is [B, P], so its first symbol is the number of sequences.
Other inputs have the same symbols, which determine their sizes.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from .buffers import ProgramError
from .program import Bucket

# T tokens, B sequences, P blocks a sequence, NP pages of a KV cache
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "input_ids": ("T",),
    "positions": ("T",),
    "slot_mapping": ("T",),
    "adapter_index": ("T",),
    "block_table": ("B", "P"),
    "context_lens": ("B",),
    "query_start": ("B+1",),
    "logits_indices": ("B",),
}
_CACHES = re.compile(r"kv_(cache|scale)s?(_\d+)*")

# Specification of a placeholder: (shape, dtype), an example tensor (its strides are used too), or an integer
Spec = tuple[tuple[int, ...], torch.dtype] | torch.Tensor | int


class SpecializeError(ProgramError):
    """A graph can't be made static at these sizes."""


def dimensions_of(name: str) -> tuple[str, ...]:
    """Return the meaning of an input's leading dimensions; () if unknown."""
    return ("NP",) if _CACHES.fullmatch(name) else DIMENSIONS.get(name, ())


def placeholders(graph: fx.Graph) -> Iterator[fx.Node]:
    """Return the graph's inputs, weights and adapters."""
    return (node for node in graph.nodes if node.op == "placeholder")


def symbol_roles(graph: fx.Graph) -> dict[Any, str]:
    """Return symbol -> `T`, `B`, `B+1`, `P` or `NP`, from the names of inputs with this symbol as a dimension."""
    roles: dict[Any, str] = {}
    for node in placeholders(graph):
        shape = getattr(node.meta.get("val"), "shape", ())
        for size, role in zip(shape, dimensions_of(node.name), strict=False):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                known = roles.setdefault(size.node.expr, role)
                if known != role:
                    raise SpecializeError(
                        f"the graph has one symbol for {known} and {role} (see {node.name}); capture it with example "
                        "inputs in which the two differ"
                    )
    return roles


def bucket_inputs(graph_module: fx.GraphModule, bucket: Bucket) -> dict[str, Spec]:
    """Return placeholder name -> (shape, dtype) at the sizes of `bucket`. Raises SpecializeError."""
    values = {
        "T": bucket.tokens,
        "B": bucket.sequences,
        "B+1": bucket.sequences + 1,
        "P": bucket.blocks,
        "NP": bucket.pages,
    }
    sizes = {symbol: values[role] for symbol, role in symbol_roles(graph_module.graph).items()}
    specs: dict[str, Spec] = {}
    for node in placeholders(graph_module.graph):
        value = node.meta.get("val")
        if isinstance(value, int):
            specs[node.name] = value
            continue
        if not isinstance(value, torch.Tensor):
            raise SpecializeError(f"input {node.name} has no fake tensor in meta['val']")
        shape = tuple(_static(size, sizes, node.name) for size in value.shape)
        for size, role in zip(shape, dimensions_of(node.name), strict=False):
            if size != values[role]:
                remedy = f"capture the graph with a dynamic {role}"
                raise SpecializeError(
                    f"input {node.name} has {role} = {size} in the graph, the bucket asks for {values[role]}; {remedy}"
                )
        specs[node.name] = (shape, value.dtype)
    return specs


def _static(size: int | torch.SymInt, sizes: Mapping[Any, int], name: str) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    result = size.node.expr.xreplace(dict(sizes))
    if getattr(result, "free_symbols", None):
        raise SpecializeError(
            f"input {name} has the size {size}, which no bucket size determines; known symbols: "
            f"{', '.join(map(str, sizes)) or 'none'}"
        )
    return int(result)


def describe_size(size: int | torch.SymInt, roles: Mapping[Any, str]) -> str:
    """Return a dimension as text: `4096`, `T`, `B+1`, or the symbol's expression."""
    if not isinstance(size, torch.SymInt):
        return str(size)
    expression = size.node.expr
    if expression.is_Symbol:
        return roles.get(expression, str(expression))
    return _in_roles(expression, tuple(roles.items()))


@lru_cache(maxsize=1024)  # the nodes of a graph share few expressions, and printing one is slow
def _in_roles(expression: Any, roles: tuple[tuple[Any, str], ...]) -> str:
    text = str(expression)
    for symbol, role in roles:
        text = re.sub(rf"\b{re.escape(str(symbol))}\b", role, text)
    return text.replace(" ", "")
