"""Activations of some decode steps with one scale per token and 128 columns instead of one per token."""

import operator

from torch import fx

from ...ops.attention.paged_attention import paged_attention_quant
from ...ops.attention.paged_attention_blocks import paged_attention_blocks
from ...ops.core.registry import Op
from ...ops.linear.linear_8bit import linear_8bit
from ...ops.lora.shrink import lora_shrink
from ...ops.rows.quantize_blocks import BLOCK
from ...ops.rows.silu_mul import silu_mul_quant
from ...ops.rows.silu_mul_blocks import silu_mul_blocks
from ..graph.nodes import args_of, insert_call, is_call
from .base import Context, PassReport

# elsewhere the launches that are saved do not make up for what linears and shrinks take longer (H200)
FEWEST_TOKENS, MOST_TOKENS = 17, 32
READERS = ((linear_8bit, 1), (lora_shrink, 7))  # who takes scales by block, and as which argument


def quantize_in_blocks(graph: fx.Graph, context: Context) -> PassReport:
    """Attention and SiLU * mul quantize what they have just computed; nothing waits for the largest value of a row,
    which other CTAs hold.

    before  y, q, s = paged_attention_quant(...); o = linear_8bit(q, s, weight, ...); planes = lora_shrink(q, ..., s)
    after   q, s = paged_attention_blocks(...); o = linear_8bit(q, s, weight, ...); planes = lora_shrink(q, ..., s)

    s is [columns / 128, tokens padded]. The same for silu_mul_quant -> silu_mul_blocks: two launches a layer fewer, and
    finer steps. For graphs with static sizes, of 17 to 32 tokens. Leaves rows that something else reads too, and widths
    that are no multiple of 128.
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
            results = tuple(insert_call(graph, operator.getitem, (new, place), like=node) for place in (0, 1))
        for pick in list(node.users):
            pick.replace_all_uses_with(results[args_of(pick)[1] - 1])
        report.matches += 1
    return report


def _in_blocks(node: fx.Node) -> tuple[Op, tuple[object, ...]]:
    """The op that quantizes in blocks, and its arguments."""
    if is_call(node, silu_mul_quant):
        gate_up, delta, _keep, *form = args_of(node)
        return silu_mul_blocks, (gate_up, delta, *form)
    *inputs, _query_start, scale, _quantize_q, _decode, _keep, dtype, _rotate = args_of(node)
    return paged_attention_blocks, (*inputs, scale, dtype)


def _stays(node: fx.Node) -> str | None:
    """Why a producer keeps its row scales."""
    if is_call(node, paged_attention_quant):
        *_, decode, _keep, _dtype, rotate = args_of(node)
        if not decode or rotate:
            return "its rows are rotated" if rotate else "more than one token a sequence"
    q = node.meta["val"][1]
    tokens, width = q.numel() // q.shape[-1], int(q.shape[-1])
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS or q.dim() != 2:
        return f"{tokens} tokens: a scale a row is as fast outside of {FEWEST_TOKENS} to {MOST_TOKENS}"
    if width % BLOCK:
        return f"rows of {width} are no whole blocks of {BLOCK}"
    for pick in node.users:
        place = args_of(pick)[1]
        for user in pick.users:
            takes = next((argument for op, argument in READERS if is_call(user, op)), None)
            if takes is None or args_of(user)[0 if place == 1 else takes] is not pick:
                return f"{user.name} reads it and takes no scales by block"
    return None
