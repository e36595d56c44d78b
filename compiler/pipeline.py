"""The ordered lists of passes, and the driver that runs them.

The driver removes dead code, lints the graph, compares match counts with the model's shape, and records each pass.
"""

import difflib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..ops.moe.route import moe_route
from .expected_matches import Expectation, model_shape
from .graph.capture import Captured
from .graph.nodes import aten, calls, erase_unused, shared_values
from .options import CompileOptions, OptionError
from .pass_records import PassRecord, graph_lines, op_counts, text_of
from .passes.base import Context, PassReport
from .passes.experts.fuse_combine_norm import fuse_combine_norm
from .passes.experts.lower_experts import lower_experts
from .passes.fuse.fuse_add_rms_norm import fuse_add_rms_norm
from .passes.fuse.fuse_decoder_block import fuse_decoder_block
from .passes.fuse.fuse_quantize import fuse_quantize
from .passes.fuse.fuse_rope_append import fuse_rope_append
from .passes.fuse.fuse_silu_mul import fuse_linear_silu_mul, fuse_silu_mul
from .passes.fuse.pack_projections import pack_projections
from .passes.fuse.quantize_in_blocks import quantize_in_blocks
from .passes.fuse.share_prefix import share_prefix
from .passes.fuse.widen_kv_once import widen_kv_once
from .passes.lift.fold_multipliers import fold_multipliers
from .passes.lift.lift_bias import lift_bias
from .passes.lift.lift_embedding import lift_embedding
from .passes.lift.lift_lora import lift_lora
from .passes.lift.lift_rms_norm import lift_rms_norm
from .passes.lift.lift_rope import lift_rope, lift_rope_angles
from .passes.lift.lift_stored_weights import lift_stored_weights
from .passes.lift.normalize import normalize
from .passes.lora.fuse_lora_expand import fuse_lora_expand
from .passes.lora.fuse_lora_silu_mul import fuse_lora_silu_mul
from .passes.lora.lower_lora import lower_lora
from .passes.lora.quantize_lora import quantize_lora
from .passes.lora.round_lora_ranks import round_lora_ranks
from .passes.parallel.fuse_all_reduce_norm import fuse_all_reduce_norm
from .passes.parallel.shard import shard
from .passes.quantize.balance_keys import balance_keys
from .passes.quantize.center_keys import center_keys
from .passes.quantize.finer_logits import finer_logits
from .passes.quantize.finer_residual import finer_residual
from .passes.quantize.quantize_kv import quantize_kv
from .passes.quantize.quantize_linears import quantize_linears
from .passes.quantize.rotate_values import rotate_values
from .passes.quantize.smooth_channels import smooth_channels
from .passes.quantize.use_rounded_weights import use_rounded_weights
from .program.program import Bucket


@dataclass(frozen=True)
class Pass:
    """A pass and its tier.

    "keeps" changes no values, except by the rounding of sums; "quantizes" changes values; "lowers" chooses kernels.
    """

    run: Callable[[fx.Graph, Context], PassReport]
    tier: str

    @property
    def name(self) -> str:
        """The pass's name, as in the option `disable`."""
        return self.run.__name__

    @property
    def about(self) -> str:
        """The first paragraph of the pass's docstring, as one line."""
        return " ".join((self.run.__doc__ or "").strip().partition("\n\n")[0].split())


PASSES: tuple[Pass, ...] = (
    # ATen idioms -> semantic ops. Only these passes depend on how a model or a torch release spells an idiom.
    Pass(normalize, "keeps"),
    Pass(lift_stored_weights, "keeps"),
    Pass(lift_bias, "keeps"),
    Pass(lift_embedding, "keeps"),
    Pass(lift_rms_norm, "keeps"),
    Pass(lift_rope_angles, "keeps"),
    Pass(lift_rope, "keeps"),
    Pass(lift_lora, "keeps"),
    Pass(fold_multipliers, "keeps"),
    Pass(rotate_values, "keeps"),  # before the projections are packed
    Pass(smooth_channels, "keeps"),
    # Fewer and larger ops with the same values.
    Pass(pack_projections, "keeps"),
    Pass(shard, "keeps"),  # later passes rewrite the rank's share of the model
    Pass(fuse_silu_mul, "keeps"),
    Pass(fuse_add_rms_norm, "keeps"),
    # Eight bits. The append is fused after quantize_kv, which determines its arguments.
    Pass(quantize_kv, "quantizes"),
    Pass(center_keys, "quantizes"),
    Pass(fuse_rope_append, "keeps"),
    Pass(balance_keys, "quantizes"),
    Pass(quantize_linears, "quantizes"),
    Pass(finer_logits, "quantizes"),
    Pass(finer_residual, "quantizes"),
    Pass(use_rounded_weights, "quantizes"),
    Pass(quantize_lora, "quantizes"),
    Pass(fuse_quantize, "keeps"),
    Pass(fuse_all_reduce_norm, "keeps"),
    # Kernels and lanes.
    Pass(lower_lora, "lowers"),
)
# For graphs with a router: each runs before the pass of this name.
EXPERT_PASSES: Mapping[str, Pass] = {
    "fuse_quantize": Pass(fuse_combine_norm, "keeps"),  # after finer_residual, which follows plain norms
    "lower_lora": Pass(lower_experts, "lowers"),
}
# For the static graph of a decode program: row b is sequence b, and a program without LoRA has no LoRA ops. The last
# pass runs only for buckets with `cascade`.
DECODE_PASSES: tuple[Pass, ...] = (
    Pass(fuse_quantize, "keeps"),  # again: here no op selects rows between the last norm and its quantization
    Pass(fuse_all_reduce_norm, "keeps"),
    Pass(fuse_decoder_block, "quantizes"),
    Pass(fuse_linear_silu_mul, "keeps"),
    Pass(fuse_lora_silu_mul, "quantizes"),
    Pass(round_lora_ranks, "quantizes"),
    Pass(quantize_in_blocks, "quantizes"),
    Pass(share_prefix, "keeps"),
)
# For the static graph of a prompt program.
PROMPT_PASSES: tuple[Pass, ...] = (
    Pass(fuse_lora_expand, "keeps"),
    Pass(widen_kv_once, "keeps"),
)
# For the static graph of a program for steps with drafts: its linears are those of a decode step with as many tokens.
VERIFY_PASSES = DECODE_PASSES
STATIC_PASSES = (*DECODE_PASSES, *PROMPT_PASSES)
SAME_VALUES = frozenset({"fuse_quantize", "widen_kv_once"})  # static passes that do not change the rounding
ALWAYS_ON = frozenset({"normalize"})
ATTENTION_OPS = ("paged_attention", "paged_attention_quant")


def static_passes(bucket: Bucket | None, options: CompileOptions) -> tuple[Pass, ...]:
    """Return the passes for the static graph of a bucket's program; none without a bucket.

    share_prefix is for buckets with `cascade`. With `size_independent`, only those that change no value, and
    fuse_decoder_block if whole_layer="on".
    """
    if bucket is None:
        return ()
    chosen = DECODE_PASSES if bucket.decode else VERIFY_PASSES if bucket.verifies else PROMPT_PASSES
    if not bucket.cascade:
        chosen = tuple(each for each in chosen if each.run is not share_prefix)
    if not options.size_independent:
        return chosen
    kept = {*SAME_VALUES, "fuse_decoder_block"} if options.whole_layer == "on" else SAME_VALUES
    return tuple(each for each in chosen if each.name in kept)


def pass_names() -> tuple[str, ...]:
    """Return the names of all passes in order, each once."""
    return tuple(dict.fromkeys(each.name for each in (*PASSES, *EXPERT_PASSES.values(), *STATIC_PASSES)))


def passes_for(graph: fx.Graph, passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """Return `passes`, with those of EXPERT_PASSES for a graph with a router."""
    return with_expert_passes(passes) if any(calls(graph, moe_route)) else passes


def with_expert_passes(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """Return `passes` with those of EXPERT_PASSES in their places."""
    return tuple(one for each in passes for one in (EXPERT_PASSES.get(each.name), each) if one is not None)


def insert_pass(
    run: Callable[[fx.Graph, Context], PassReport],
    *,
    after: str = "",
    before: str = "",
    tier: str = "keeps",
    passes: tuple[Pass, ...] = PASSES,
) -> tuple[Pass, ...]:
    """Return `passes` with `run` inserted after the pass `after` or before the pass `before`, for `compile(passes=)`.

    The new pass has its function's name. Raises OptionError for an unknown pass, or a name that another pass has.
    """
    names, new = [each.name for each in passes], Pass(run, tier)
    if bool(after) == bool(before):
        raise OptionError(f"give one of after=PASS and before=PASS for {new.name!r}; passes: {', '.join(names)}")
    if new.name in names:
        raise OptionError(f"there is a pass named {new.name!r} already; give the function another name")
    if (after or before) not in names:
        raise OptionError(
            f"{new.name!r} can't be {'after' if after else 'before'} {after or before!r}, which is not a pass; passes: "
            f"{', '.join(names)}"
        )
    place = names.index(after) + 1 if after else names.index(before)
    return (*passes[:place], new, *passes[place:])


def check_disabled(options: CompileOptions, passes: tuple[Pass, ...] = PASSES) -> None:
    """Raise OptionError for a name in `options.disable` that is not a pass, or that of a pass which is always on."""
    names = list(dict.fromkeys(each.name for each in (*passes, *EXPERT_PASSES.values(), *STATIC_PASSES)))
    for name in options.disable:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise OptionError(
                f"disable names {name!r}, which is not a pass"
                + (f"; did you mean {near[0]!r}?" if near else ".")
                + f" Passes: {', '.join(map(repr, names))}"
            )
        if name in ALWAYS_ON:
            raise OptionError(f"pass {name!r} can't be disabled: all later patterns need it")


@dataclass(frozen=True)
class Optimized:
    """A captured graph after the passes, and their records."""

    captured: Captured
    records: list[PassRecord]


def optimize(
    captured: Captured,
    options: CompileOptions,
    names: Iterable[str],
    passes: tuple[Pass, ...] = PASSES,
    observe: Callable[[PassRecord], None] | None = None,
    text: bool = True,
) -> Optimized:
    """Run the passes over a captured graph, in place. Raises PassCountError for an unexpected number of matches.

    `names`: the module's parameters and buffers, which determine the expected counts. `observe` is called after each
    pass, with the graph in the state after that pass. Without `text` records contain no graphs: writing these takes
    longer than the passes.
    """
    targets = [node.target for node in captured.graph_module.graph.nodes]
    paged = any(getattr(target, "_opname", "") in ATTENTION_OPS for target in targets)
    shape = model_shape(names, paged, targets.count(aten.neg.default))
    expectation = None if shape is None else Expectation(shape, options)
    return Optimized(captured, run_passes(captured.graph_module, options, expectation, passes, observe, text))


def run_passes(
    graph_module: fx.GraphModule,
    options: CompileOptions,
    expectation: Expectation | None = None,
    passes: tuple[Pass, ...] = PASSES,
    observe: Callable[[PassRecord], None] | None = None,
    text: bool = True,
) -> list[PassRecord]:
    """Run the passes on `graph_module`, in place, and return one record per enabled pass; see `optimize`."""
    check_disabled(options, passes)
    clean_up(graph_module.graph)
    passes = passes_for(graph_module.graph, passes)
    records: list[PassRecord] = []
    for record in _run(graph_module.graph, Context(options), passes, clean_up, text):
        records.append(record)
        if expectation is not None and options.check_counts:
            expectation.check(record.name, record.matches, record.rejected)
        if observe is not None:
            observe(record)
    graph_module.recompile()
    return records


def run_static_passes(
    graph: fx.Graph, options: CompileOptions, sm_count: int, passes: tuple[Pass, ...]
) -> list[PassRecord]:
    """Run the passes on a program's static graph, in place; return one record, without text, per enabled pass."""
    return list(_run(graph, Context(options, sm_count), passes, erase_unused, text=False))


def _run(
    graph: fx.Graph, context: Context, passes: Iterable[Pass], clean: Callable[[fx.Graph], None], text: bool
) -> Iterator[PassRecord]:
    """Run each enabled pass, lint and `clean` the graph, and yield the pass's record."""
    lines, counts = graph_lines(graph) if text else (), op_counts(graph)
    source = text_of(lines) if text else ""
    values: dict[Hashable, Any] = {}
    for each in passes:
        if each.name in context.options.disable:
            continue
        old_lines, old_counts, old_source, start = lines, counts, source, time.perf_counter()
        with shared_values(values):
            report = each.run(graph, context)
        graph.lint()
        clean(graph)
        seconds = time.perf_counter() - start
        lines, counts = graph_lines(graph) if text else (), op_counts(graph)
        source = text_of(lines) if text else ""
        yield PassRecord(
            each.name,
            each.tier,
            report.matches,
            report.rejected,
            *(old_counts, counts, old_source, source, seconds, old_lines, lines),
            about=each.about,
        )


def clean_up(graph: fx.Graph) -> None:
    """Remove dead nodes, and weights and adapter stacks without a reader. Inputs stay, since callers pass them."""
    erase_unused(graph)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.meta.get("kind") in ("weight", "adapter"):
            graph.erase_node(node)
