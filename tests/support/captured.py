"""Our Llama captured once for each shape of it in a run: capturing takes seconds, and a copy of its graph is the same.

conftest.py puts `capture_once` in the place of `capture_module` wherever sidestream captures a model.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
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


@contextmanager
def captures_shared() -> Iterator[None]:
    """Every module of sidestream captures with `capture_once` meanwhile."""
    with pytest.MonkeyPatch.context() as patched:
        for name, module in list(sys.modules.items()):
            if name.startswith("sidestream.") and vars(module).get("capture_module") is capture_module:
                patched.setattr(module, "capture_module", capture_once)
        yield
