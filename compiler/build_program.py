"""Build one program from an optimized graph and a bucket."""

from collections.abc import Mapping, Sequence

from torch import fx

from ..ops.core.device import H200_SMS
from .options import CompileOptions
from .pass_records import PassRecord, pass_table, refusals
from .pipeline import run_static_passes, static_passes
from .program.lower import lower
from .program.memory import plan_memory
from .program.program import Bucket, Program
from .program.schedule import schedule
from .program.sizes import Spec
from .program.specialize import propagate, specialize


def build_program(
    graph_module: fx.GraphModule,
    sizes: Bucket | Mapping[str, Spec],
    options: CompileOptions | None = None,
) -> Program:
    """Specialize the graph, run the static passes, lower, schedule and plan the memory of one program.

    `sizes`: a bucket, or placeholder name -> (shape, dtype), example tensor or integer. `options.lora_lowering` decides
    whether LoRA has its own stream (`auto`: in buckets of decode steps and of steps with drafts). Raises ProgramError
    (SpecializeError) when the graph does not fit these sizes.
    """
    options = options or CompileOptions()
    bucket = sizes if isinstance(sizes, Bucket) else None
    graph = specialize(graph_module, sizes, size_independent=options.size_independent, exact=options.exact)
    records = run_static_passes(graph, options, H200_SMS, static_passes(bucket, options))
    if any(record.matches for record in records):
        propagate(graph)
    draft = lower(graph)
    two_streams = options.lora_lowering == "side_stream" or (
        options.lora_lowering == "auto" and bucket is not None and (bucket.decode or bucket.verifies)
    )
    steps = schedule(
        draft.operations, two_streams=two_streams, sm_count=H200_SMS, side_share=options.lora_sm_share, pdl=options.pdl
    )
    buffers, arena_bytes = plan_memory(draft.buffers, steps)
    return Program(
        bucket,
        buffers,
        steps,
        arena_bytes,
        draft.outputs,
        draft.recipes,
        single_output=draft.single_output,
        passes=_pass_text(records),
    )


def _pass_text(records: Sequence[PassRecord]) -> str:
    """Return the table and refusals of a program's own passes; empty without such passes."""
    refused = refusals(records)
    return pass_table(records) + refused if records else ""
