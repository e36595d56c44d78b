"""`sidestream inspect explain`: estimate the time of a model's steps, and the effect of other options."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ..options.engine import (
    add_command,
    add_compile_options,
    add_lora_options,
    add_model,
    add_ranks,
    compile_arguments,
    positive,
    ranks_arguments,
)
from ..options.models import (
    add_buckets,
    add_gpu,
    add_shape,
    as_bucket,
    gpu_for,
    lora_shape,
    model_config,
)

DESCRIPTION = """\
Compile a model and explain its steps: the pass table, kernels per layer on both lanes, the estimated time of a step
next to the floor (weights, cached tokens and adapters read once) and by op, and the time with another option or without
a pass. No weights are read and no GPU is needed. Times are estimates from bytes and FLOPs; docs/measurements has their
error."""

EXAMPLES = """\
examples:
  sidestream inspect explain                                                     the demo model and its adapters
  sidestream inspect explain --shape llama-3.1-8b --max-loras 8 --max-lora-rank 32 --bucket decode:1 decode:64
  sidestream inspect explain --shape llama-3.1-8b --bucket decode:1 verify3:1    a step with three drafts
  sidestream inspect explain --json | jq '.programs[].estimated_us'"""

CUTS = (1, 2)  # numbers of layers of deeper models in the table of changes, since each layer adds the same time


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to `sidestream inspect`."""
    usage = "%(prog)s [MODEL] [--bucket KIND:N ...] [options]"
    parser = add_command(
        commands, "explain", "estimate the time of a step, and the effect of options", DESCRIPTION, EXAMPLES, run, usage
    )
    add_model(parser)
    add_shape(parser)
    add_buckets(
        parser,
        "programs to explain: decode:N and mixed:N, verify1:N, verify3:N and verify7:N for steps with drafts, and "
        "cascade:N for cascade attention, estimated without shared pages; changes are compared for the first one",
    )
    parser.add_argument(
        "--context", type=positive, metavar="N", help="cached tokens of a sequence (default: half of the bucket's)"
    )
    parser.add_argument(
        "--adapters-in-batch", type=positive, metavar="N", help="active adapters (default: one per sequence)"
    )
    add_gpu(parser)
    parser.add_argument("--no-changes", action="store_true", help="leave out the table of changes")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_ranks(parser)
    add_compile_options(parser)
    add_lora_options(parser)


def run(options: argparse.Namespace) -> int:
    """Compile on the meta device and print."""
    from ...compiler.api import compile_model
    from ...compiler.cost.bytes_and_flops import Assumptions
    from ...compiler.inspect.explain import as_text, changes_as_text, compare_changes, explain
    from ...compiler.options import CompileOptions
    from ...graphs.llama import Llama
    from ...ops.core.kv_layout import pages_for

    gpu, config = gpu_for(options), model_config(options)
    compile_options = CompileOptions(**compile_arguments(options), **ranks_arguments(options))
    lora = lora_shape(options, config)
    buckets = [as_bucket(kind, count, lora is not None) for kind, count in options.bucket]
    if options.context is not None:
        buckets = [replace(each, blocks=max(each.blocks, pages_for(options.context))) for each in buckets]
        buckets = [replace(each, pages=each.sequences * each.blocks + 1) for each in buckets]
    assume = Assumptions(options.context, options.adapters_in_batch)
    model = Llama(config, lora, compile_options.model_dtype, device="meta")
    compiled = compile_model(model, compile_options, text=False)
    programs = [compiled.program(bucket) for bucket in buckets]
    facts = explain(compile_options, compiled.records, programs, assume, gpu)
    seconds = {} if options.no_changes else changes_of(config, lora, compile_options, buckets[0], assume, gpu)
    changes = compare_changes(seconds) if seconds else []
    if options.json:
        compared = {"program": buckets[0].name, "now_us": 1e6 * seconds.get("", 0.0)}
        print(json.dumps({**facts, "changes": {**compared, "found": [asdict(each) for each in changes]}}))
        return 0
    print(f"precision {compile_options.precision}")
    print(as_text(facts, compiled.records))
    if changes:
        print(changes_as_text(changes, seconds[""], buckets[0].name))
    return 0


def changes_of(config: Any, lora: Any, options: Any, bucket: Any, assume: Any, gpu: Any) -> dict[str, float]:
    """Return change -> seconds per step of the whole model.

    Deep models are compiled with two depths, and the difference is multiplied.
    """
    from ...compiler.inspect.explain import what_ifs

    depth = config.num_hidden_layers
    if depth <= CUTS[1]:
        return what_ifs(capturer(config, lora), options, bucket, assume=assume, gpu=gpu)
    few, more = (
        what_ifs(capturer(replace(config, num_hidden_layers=cut), lora), options, bucket, assume=assume, gpu=gpu)
        for cut in CUTS
    )
    return {change: more[change] + (depth - CUTS[1]) * (more[change] - few[change]) for change in more if change in few}


def capturer(config: Any, lora: Any) -> Callable[[Any], tuple[Any, list[str]]]:
    """Return a function options -> (a new graph of the model, names of its tensors); each dtype is captured once."""
    from ...compiler.graph.repeated_layers import capture_model
    from ...graphs.llama import Llama

    known: dict[Any, tuple[Any, list[str]]] = {}

    def capture(options: Any) -> tuple[Any, list[str]]:
        if options.model_dtype not in known:
            model = Llama(config, lora, options.model_dtype, device="meta")
            names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
            known[options.model_dtype] = capture_model(model), names
        captured, names = known[options.model_dtype]
        return captured.copy(), names

    return capture
