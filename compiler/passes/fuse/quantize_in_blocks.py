"""Activations of decode steps of 17 to 32 tokens with one scale per token and 128 columns instead of one per token."""

from torch import fx

from ....ops.attention.paged_attention import paged_attention_quant
from ....ops.attention.paged_attention_blocks import paged_attention_blocks
from ....ops.core.registry import Op
from ....ops.elementwise.quantize_blocks import BLOCK
from ....ops.elementwise.silu_mul import silu_mul_quant
from ....ops.elementwise.silu_mul_blocks import silu_mul_blocks
from ....ops.linear.linear_8bit import linear_8bit
from ....ops.lora.shrink import lora_shrink
from ...graph.nodes import bind, calls, insert_call, insert_picks, is_call, operands_for, picks_of, replace_picks
from ..base import Context, PassReport, Refused, rewrite_each

# for other token counts slower linears and shrinks take more time than the saved launches (H200)
FEWEST_TOKENS, MOST_TOKENS = 17, 32
READERS = ((linear_8bit, "q", "scale"), (lora_shrink, "x", "x_scale"))  # ops that support block scales; argument names


def quantize_in_blocks(graph: fx.Graph, context: Context) -> PassReport:
    """Quantize attention's and SiLU * mul's results per 128 columns, which needs no maximum of the whole row.

    before  y, q, s = paged_attention_quant(...); o = linear_8bit(q, s, weight, ...); planes = lora_shrink(q, ..., s)
    after   q, s = paged_attention_blocks(...); o = linear_8bit(q, s, weight, ...); planes = lora_shrink(q, ..., s)

    s is [columns / 128, tokens padded]; silu_mul_quant becomes silu_mul_blocks. This saves two launches per layer, and
    the steps are finer. For static sizes of 17 to 32 tokens. Leaves rows with other readers, and widths that are not a
    multiple of 128.
    """

    def rewrite(node: fx.Node) -> None:
        _check(node)
        op, arguments = _in_blocks(node)
        with graph.inserting_before(node):
            new = insert_call(graph, op, arguments, like=node)
            q, scale = insert_picks(graph, new, (0, 1), like=node)
        replace_picks(node, {1: q, 2: scale})

    return rewrite_each(calls(graph, paged_attention_quant, silu_mul_quant), rewrite)


def _in_blocks(node: fx.Node) -> tuple[Op, tuple[object, ...]]:
    """Return the op that quantizes in blocks, and its arguments."""
    operands = bind(node)
    if is_call(node, silu_mul_quant):
        return silu_mul_blocks, (operands.gate_up, operands.delta, operands.dtype, operands.rotate)
    return paged_attention_blocks, blocks_arguments(node)


def blocks_arguments(attention: fx.Node) -> tuple[object, ...]:
    """Return the arguments of `paged_attention_blocks` in place of a `paged_attention_quant` with few rows."""
    operands = bind(attention)
    one_row = {"query_start": None, "rows": 1} if operands.decode else {}
    return operands_for(attention, paged_attention_blocks, dtype=operands.dtype, **one_row)


def has_few_rows(attention: fx.Node) -> bool:
    """Return whether `paged_attention_blocks` supports the rows per sequence: one, or the few of a step with drafts."""
    operands = bind(attention)
    return operands.decode or (operands.rows > 0 and not operands.quantize_q)


def _check(node: fx.Node) -> None:
    if is_call(node, paged_attention_quant):
        if bind(node).rotate:
            raise Refused("its rows are rotated")
        if not has_few_rows(node):
            raise Refused("more than one token per sequence")
    q = node.meta["val"][1]
    tokens, width = q.numel() // q.shape[-1], int(q.shape[-1])
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS or q.dim() != 2:
        raise Refused(f"{tokens} tokens: one scale per row is as fast outside of {FEWEST_TOKENS} to {MOST_TOKENS}")
    if width % BLOCK:
        raise Refused(f"rows of {width} are not whole blocks of {BLOCK}")
    for place, pick in picks_of(node):
        for user in pick.users:
            operands = next((names for op, *names in READERS if is_call(user, op)), None)
            if operands is None or getattr(bind(user), operands[0 if place == 1 else 1]) is not pick:
                raise Refused(f"{user.name} reads it and does not support block scales")
