"""Decide whether an engine has programs with cascade attention, and for which steps they are."""

from ...compiler.options import CompileOptions
from ...graphs.config import LlamaConfig
from ...ops.attention.paged_attention import takes_prefix
from ...ops.attention.prefill_gluon import tile_tokens
from ...ops.core.triton_support import cdiv
from ..engine.options import EngineOptions
from ..scheduler.step_plan import CASCADE_SEQUENCES

LEAST_READS = 11_000
"""Reads of a page of one KV head that a step must save. By docs/measurements/shared_prefix_h200.txt steps gain from
about 9,000 on.
"""


def cascade_limits(
    config: LlamaConfig, engine: EngineOptions, options: CompileOptions, max_num_seqs: int
) -> tuple[int, int]:
    """Return `cascade_tile` and `cascade_pages` of `SchedulerLimits`; (0, 0): the engine has no such programs.

    Those of a CPU and of an exact engine would round differently than its others.
    """
    heads = config.num_attention_heads // options.tensor_parallel
    kv_heads = max(1, config.num_key_value_heads // options.tensor_parallel)
    windows = any(config.window_of(layer) for layer in range(config.num_hidden_layers))
    chosen = engine.cascade_attention and engine.enable_prefix_caching and engine.speculation == "off"
    if not chosen or options.size_independent or windows or max_num_seqs < CASCADE_SEQUENCES:
        return 0, 0
    if not takes_prefix(heads, kv_heads, config.head_dim, options.cache_dtype):
        return 0, 0
    return tile_tokens(heads, kv_heads), cdiv(LEAST_READS, kv_heads)
