"""The paged runner of `support.paged` over a compiled model: same chunks in, logits out, cache as the options say."""

from collections.abc import Sequence
from typing import Any

import sidestream
import torch
from sidestream.compiler.api import CompiledModel
from sidestream.compiler.options import CompileOptions
from sidestream.graphs.llama import Llama
from sidestream.ops.core.kv_layout import kv_scales_shape

from .paged import Chunk, PagedRunner


class CompiledRunner(PagedRunner):
    """Runs `sidestream.compile(model, options)` step by step."""

    def __init__(self, model: Llama, options: CompileOptions, sequences: int, **kwargs: Any) -> None:
        super().__init__(model, sequences, **kwargs)
        self.compiled: CompiledModel = sidestream.compile(model, options, text=False)
        dtype = options.cache_dtype
        nodes = {node.name: node for node in self.compiled.graph_module.graph.nodes}
        own = nodes["kv_caches_0"].meta["val"].shape[1]
        self.kv_caches = [cache[:, :own].contiguous() for cache in self.kv_caches]  # a rank's heads
        self.kv_caches = [cache.nan_to_num().to(dtype) for cache in self.kv_caches]
        pages, heads = self.kv_caches[0].shape[:2]
        names = self.compiled.input_names
        self.extra = (
            {"kv_scales": [torch.zeros(kv_scales_shape(pages, heads)) for _ in self.kv_caches]}
            if "kv_scales_0" in names
            else {}
        )
        if not self.extra:
            self.kv_caches = [cache.to(model.dtype) for cache in self.kv_caches]

    @torch.no_grad()
    def step(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        logits = self.compiled(**self.inputs(chunks), **self.extra).float()
        return list(logits.split([len(chunk.tokens) for chunk in chunks]))
