"""Our Llama captured once for each shape of it in a run: capturing takes seconds, and a copy of its graph is the same.

conftest.py puts `capture_once` in the place of `capture_module` where models are compiled.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sidestream.compiler.graph.capture import Captured, capture_module
from sidestream.graphs.draft.steps import ChainStep, FirstPass
from sidestream.graphs.llama import Llama

_KNOWN: dict[str, Captured] = {}


def capture_once(
    module: torch.nn.Module, example_inputs: dict[str, Any] | Sequence[Any], dynamic_shapes: Any = None
) -> Captured:
    """`capture_module`, but a Llama of a shape that was seen gets a copy of its graph, with its own tensors."""
    if type(module) not in (Llama, FirstPass, ChainStep):
        return capture_module(module, example_inputs, dynamic_shapes)
    device = next(module.parameters()).device
    parts = [(name, type(part)) for name, part in module.named_modules()]  # a test may have exchanged one
    features = module.model.features if type(module) is Llama else type(module)
    key = f"{module.config} {module.lora} {module.dtype} {features} {device} {parts}"
    if key not in _KNOWN:
        _KNOWN[key] = capture_module(module, example_inputs, dynamic_shapes)
    known = _KNOWN[key].copy()
    return replace(known, constants={**known.constants, **dict(module.named_buffers())})
