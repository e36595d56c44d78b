"""Activations of some decode steps with one scale per token and 128 columns instead of one per token."""

from torch import fx

from ....ops.attention.paged_attention import paged_attention_quant
from ....ops.attention.paged_attention_blocks import paged_attention_blocks
from ....ops.core.registry import Op
from ....ops.elementwise.quantize_blocks import BLOCK
from ....ops.elementwise.silu_mul import silu_mul_quant
from ....ops.elementwise.silu_mul_blocks import silu_mul_blocks
from ....ops.linear.linear_8bit import linear_8bit
from ....ops.lora.shrink import lora_shrink
from ...graph.nodes import bind, carried, insert_call, insert_picks, is_call, picks_of, replace_picks
from ..base import Context, PassReport

# elsewhere the launches that are saved do not make up for what linears and shrinks take longer (H200)
FEWEST_TOKENS, MOST_TOKENS = 17, 32
READERS = ((linear_8bit, "q", "scale"), (lora_shrink, "x", "x_scale"))  # who takes scales by block, as which arguments


def quantize_in_blocks(graph: fx.Graph, context: Context) -> PassReport:
    """Attention and SiLU * mul quantize what they have just computed; nothing waits for the largest value of a row,
    which other CTAs hold.

    before  y, q, s = paged_attention_quant(...); o = linear_8bit(q, s, weight, ...); planes = lora_shrink(q, ..., s)
    after   q, s = paged_attention_blocks(...); o = linear_8bit(q, s, weight, ...); planes = lora_shrink(q, ..., s)

    s is [columns / 128, tokens padded]. The same for silu_mul_quant -> silu_mul_blocks: two launches a layer fewer, and
    finer steps. For graphs with static sizes, of 17 to 32 tokens. Matches both producers. Leaves rows that something
    else reads too, and widths that are no multiple of 128.
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, paged_attention_quant, silu_mul_quant):
            continue
        reason = _stays(node)
        if reason is not None:
            report.rejected.append(f"{node.name}: {reason}")
            continue
        op, arguments = _in_blocks(node)
        with graph.inserting_before(node):
            new = insert_call(graph, op, arguments, like=node)
            q, scale = insert_picks(graph, new, (0, 1), like=node)
        replace_picks(node, {1: q, 2: scale})
        report.matches += 1
    return report


def _in_blocks(node: fx.Node) -> tuple[Op, tuple[object, ...]]:
    """The op that quantizes in blocks, and its arguments."""
    made = bind(node)
    if is_call(node, silu_mul_quant):
        return silu_mul_blocks, (made.gate_up, made.delta, made.dtype, made.rotate)
    return paged_attention_blocks, blocks_arguments(node)


def blocks_arguments(attention: fx.Node) -> tuple[object, ...]:
    """What `paged_attention_blocks` takes in place of a `paged_attention_quant` of one token a sequence, or a few."""
    made = bind(attention)
    few = {"query_start": None, "rows": 1} if made.decode else {}
    return carried(attention, paged_attention_blocks, dtype=made.dtype, **few)


def has_few_rows(attention: fx.Node) -> bool:
    """Whether its sequences have one row each, or those of a step with drafts: what `paged_attention_blocks` takes."""
    made = bind(attention)
    return made.decode or (made.rows > 0 and not made.quantize_q)


def _stays(node: fx.Node) -> str | None:
    """Why a producer keeps its row scales."""
    if is_call(node, paged_attention_quant):
        if bind(node).rotate:
            return "its rows are rotated"
        if not has_few_rows(node):
            return "more than one token a sequence"
    q = node.meta["val"][1]
    tokens, width = q.numel() // q.shape[-1], int(q.shape[-1])
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS or q.dim() != 2:
        return f"{tokens} tokens: a scale a row is as fast outside of {FEWEST_TOKENS} to {MOST_TOKENS}"
    if width % BLOCK:
        return f"rows of {width} are no whole blocks of {BLOCK}"
    for place, pick in picks_of(node):
        for user in pick.users:
            takes = next((names for op, *names in READERS if is_call(user, op)), None)
            if takes is None or getattr(bind(user), takes[0 if place == 1 else 1]) is not pick:
                return f"{user.name} reads it and takes no scales by block"
    return None
