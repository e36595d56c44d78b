"""prefill_gluon in threads on the CPU (see gluon_threads), with torch in place of its inline assembly."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sidestream.ops.attention import prefill_gluon, prefill_gluon_merge, prefill_gluon_softmax, prefill_gluon_tiles
from sidestream.ops.core import gluon_support

from .gluon_threads import kernels_in_threads


@contextmanager
def in_threads(programs: int) -> Iterator[Any]:
    """The kernel in threads, on a GPU of `programs` SMs."""

    def boxes(memory: torch.Tensor, *shape: int) -> SimpleNamespace:
        return SimpleNamespace(base=memory.view(-1, shape[1]), block_shape=shape)

    pieces, kernel = prefill_gluon_softmax, prefill_gluon
    with kernels_in_threads(gluon_support, prefill_gluon_tiles, prefill_gluon_merge, pieces, kernel):
        known: dict[str, Any] = {name: getattr(pieces, name) for name in ("gl", "mbarrier", "fence_async_shared")}
        known |= {
            name: getattr(gluon_support, name)
            for name in ("tma_load", "view_shared", "gdc_wait", "gdc_launch_dependents")
        }
        known["gl"].inline_asm_elementwise = lambda _text, _constraints, values, **_: values[0].half()
        with (
            patch.multiple(pieces, pack=lambda p: p.half(), unpack=lambda p: p),
            patch.multiple(kernel, **known, multiprocessors=lambda _device: programs),
            patch.multiple(kernel, widen=lambda x, scale: x.half() * scale),
            patch.object(kernel, "descriptors", lambda cache, scales: (boxes(cache, 64, 128), boxes(scales, 1, 64))),
        ):
            yield known["gl"]
