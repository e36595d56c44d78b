"""The numerics ledger: what each pass changes about the logits. The graph runs after every pass on the same inputs, so
a bug is attributed to a pass.

The graphs themselves run, node by node, on the CPU's references; the program that is made of the last one runs as one
more row. A decode program's own passes (`DECODE_PASSES`) follow as programs: one step more of the sequences without
adapter, over the cache that the program before has filled; then, of all sequences, those of them that do something to
LoRA.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...ops.collectives.all_reduce_add_rms_norm_quant import all_reduce_add_rms_norm_quant
from ...ops.core.device import H200_SMS
from ...ops.core.dtypes import residual_in_fp32
from ...ops.core.kv_layout import PAGE_SIZE
from ...ops.elementwise.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from ..build_program import build_program
from ..graph.capture import Captured
from ..graph.materialize import materialize
from ..graph.nodes import CASTS, aten, bind, has_operand, is_call, is_check
from ..graph.recipe import Recipe
from ..options import CompileOptions
from ..pass_records import WIDTH, PassRecord, columns
from ..pipeline import DECODE_PASSES, PASSES, Pass, optimize, run_static_passes
from ..program.layers import HEAD, TAIL, graph_layers, layer_name
from ..program.program import Bucket
from ..program.sizes import dimensions_of, placeholders
from ..program.specialize import specialize
from ..run.bound_program import BoundProgram

CAPTURE, PROGRAM, DECODE, DECODE_LORA = "(capture)", "(program)", " (decode)", " (decode, adapters)"
# which result of the op is the residual stream
_STREAM_RESULT = ((add_rms_norm, 1), (add_rms_norm_quant, 3), (all_reduce_add_rms_norm_quant, 3))


@dataclass(frozen=True)
class LedgerRow:
    """What one pass did to the logits of a batch.

    name, tier   the pass and its tier; `(capture)`: the captured graph against a reference of other precision;
                 `(program)`: the program of the last graph; a name with ` (decode)` after it: a decode program's own
                 pass; ` (decode, adapters)`: in a program with LoRA
    matches      how often the pass matched
    added        relative RMSE of the logits against those of the graph right before the pass
    total        the same against the reference: the graph before any pass, or what the caller gave
    mean_kl      mean over the tokens of KL(before || after), in nats
    worst_token  row of the logits whose KL is the largest; None where all are equal
    worst_kl     that KL
    worst_layer  the part of the model in which the residual stream's relative error grows most; "" where nothing
                 differs, or it can't be told
    growth       by how much it grows there
    """

    name: str
    tier: str
    matches: int
    added: float
    total: float
    mean_kl: float
    worst_token: int | None
    worst_kl: float
    worst_layer: str
    growth: float


@dataclass(frozen=True)
class _Run:
    logits: torch.Tensor
    streams: list[torch.Tensor] = field(default_factory=list)


def ledger(
    captured: Captured,
    options: CompileOptions,
    inputs: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    *,
    passes: tuple[Pass, ...] = PASSES,
    reference: torch.Tensor | None = None,
) -> list[LedgerRow]:
    """One row a pass, in order, one for the program, and one for each pass of decode programs where a sequence runs
    without adapter.

    `captured` stays as it is.

    `inputs`     the graph's inputs on the CPU but for the KV caches: each run gets empty ones, of the dtype and with
                 the scales that its graph asks for.
    `state`      the model's parameters and buffers (adapter stacks too) by name.
    `reference`  logits [B, V] to compare the totals with, such as the fp32 model's; default: those of the captured
                 graph.

    Raises what `compile` raises for the options and counts, ValueError for a missing input or a result that is no
    logits matrix.
    """
    copy = captured.copy()
    runner = _Runner({**captured.constants, **state}, inputs)
    before = runner.run(copy.graph_module)
    places = _places(captured.graph_module.graph)
    truth = before.logits if reference is None else reference.float()
    rows = [] if reference is None else [_row(CAPTURE, "captures", 0, _Run(truth), before, truth, places)]

    def observe(record: PassRecord) -> None:
        nonlocal before
        after = runner.run(copy.graph_module)
        rows.append(_row(record.name, record.tier, record.matches, before, after, truth, places))
        before = after

    optimize(copy, options, state, passes, observe)
    tensors = runner.tensors(copy.graph_module)
    program = _Run(
        _logits(BoundProgram(build_program(copy.graph_module, tensors, options), tensors, poison=True).run())
    )
    rows.append(_row(PROGRAM, "emits", 0, before, program, truth, places))
    if len(truth) != int(tensors["query_start"][-1]):
        return rows
    last = tensors["query_start"][1:].long() - 1
    base = [
        row
        for row, place in enumerate(last.tolist())
        if "adapter_index" not in tensors or int(tensors["adapter_index"][place]) < 0
    ]
    rows += _decode_rows(copy.graph_module, options, tensors, truth, base, lora=False)
    return rows + (
        _decode_rows(copy.graph_module, options, tensors, truth, range(len(last)), lora=True)
        if len(base) < len(last)
        else []
    )


def _decode_rows(
    graph_module: fx.GraphModule,
    options: CompileOptions,
    tensors: Mapping[str, torch.Tensor],
    truth: torch.Tensor,
    sequences: Sequence[int],
    lora: bool,
) -> list[LedgerRow]:
    """The last token of these sequences again, as a decode step with more and more of the decode programs' own passes;
    with `lora` rows of matches alone.

    `tensors`: those of the program that ran; its caches hold all tokens. `truth`: the logits of every token.
    """
    if not sequences:
        return []
    base = list(sequences)
    last, count = tensors["query_start"][1:].long()[base] - 1, len(base)
    caches = next(tensor for name, tensor in tensors.items() if dimensions_of(name) == ("NP",))
    bucket = Bucket(count, count, len(caches), tensors["block_table"].shape[1], decode=True, lora=lora)
    steps = torch.arange(count + 1, dtype=torch.int32)
    inputs = {
        name: tensors[name][last]
        for name in ("input_ids", "positions", "slot_mapping", "adapter_index")
        if name in tensors
    }
    inputs |= {name: tensors[name][base] for name in ("block_table", "context_lens")} | {
        "query_start": steps,
        "logits_indices": steps[:-1],
    }
    matches = _decode_matches(graph_module, bucket, options)
    present = [each for each in DECODE_PASSES if each.name in matches and (matches[each.name] or not lora)]
    rows: list[LedgerRow] = []
    before: _Run | None = None
    for number in range(len(present) + 1):
        chosen = replace(options, disable=(*options.disable, *(each.name for each in present[number:])))
        after = _Run(
            _logits(BoundProgram(build_program(graph_module, bucket, chosen), {**tensors, **inputs}, poison=True).run())
        )
        if before is not None:
            each = present[number - 1]
            name = each.name + (DECODE_LORA if lora else DECODE)
            row = _row(
                name,
                each.tier,
                _decode_matches(graph_module, bucket, chosen)[each.name],
                before,
                after,
                truth[last],
                [],
            )
            rows.append(replace(row, worst_token=None if row.worst_token is None else int(last[row.worst_token])))
        before = after
    return rows


def _decode_matches(graph_module: fx.GraphModule, bucket: Bucket, options: CompileOptions) -> dict[str, int]:
    """How often each pass of a decode program matches."""
    records = run_static_passes(specialize(graph_module, bucket), options, H200_SMS, DECODE_PASSES)
    return {record.name: record.matches for record in records}


def largest(rows: Sequence[LedgerRow]) -> LedgerRow:
    """The row that added most (NaN counts as most)."""
    return max(rows, key=lambda row: (row.added != row.added, row.added))


def as_json(rows: Sequence[LedgerRow]) -> dict[str, float]:
    """Pass -> relative error that it added, as `dump(ledger=...)` takes it."""
    return {
        row.name: row.added
        for row in rows
        if row.name not in (CAPTURE, PROGRAM) and not row.name.endswith((DECODE, DECODE_LORA))
    }


def as_text(rows: Sequence[LedgerRow], tokens: Sequence[str] = ()) -> str:
    """The ledger as a table; `tokens` names the rows of the logits."""
    table: list[tuple[str, ...]] = [
        ("pass", "tier", "matches", "added", "total", "mean KL", "worst KL", "worst token", "worst layer")
    ]
    for row in rows:
        worst = "" if row.worst_token is None else tokens[row.worst_token] if tokens else str(row.worst_token)
        layer = f"{row.worst_layer} (+{row.growth:.1e})" if row.worst_layer else ""
        figures = [f"{value:.1e}" if value else "0" for value in (row.added, row.total, row.mean_kl, row.worst_kl)]
        table.append((row.name, row.tier, str(row.matches), *figures, worst, layer))
    return columns(table, right=(2, 3, 4, 5, 6), width=WIDTH)


def relative_rmse(got: torch.Tensor, want: torch.Tensor) -> float:
    """sqrt(sum (got - want)^2 / sum want^2); 0 where both are zero."""
    difference, size = (got.double() - want.double()).norm(), want.double().norm()
    return float(difference / size) if float(size) else float("inf") if float(difference) else 0.0


def _row(
    name: str, tier: str, matches: int, before: _Run, after: _Run, truth: torch.Tensor, places: Sequence[str]
) -> LedgerRow:
    want, got = before.logits.log_softmax(-1), after.logits.log_softmax(-1)
    kl = (want.exp() * (want - got)).sum(-1).clamp(min=0.0)
    differs = not torch.equal(before.logits, after.logits)
    worst = int(kl.argmax()) if differs else None
    layer, growth = _worst_layer(before, after, places)
    added, total = relative_rmse(after.logits, before.logits), relative_rmse(after.logits, truth)
    return LedgerRow(name, tier, matches, added, total, float(kl.mean()), worst, float(kl.max()), layer, growth)


def _worst_layer(before: _Run, after: _Run, places: Sequence[str]) -> tuple[str, float]:
    """Where the stream's relative error grows most; the logits count as the last place."""
    first, second = [*before.streams, before.logits], [*after.streams, after.logits]
    if len(first) != len(places) or [value.shape for value in first] != [value.shape for value in second]:
        return "", 0.0
    errors = [0.0, *(relative_rmse(got, want) for got, want in zip(second, first, strict=True))]
    growth = [error - earlier for earlier, error in pairwise(errors)]
    # the first NaN is the worst
    worst = max(range(len(growth)), key=lambda place: (growth[place] != growth[place], growth[place]))
    return ("", 0.0) if growth[worst] <= 0.0 else (places[worst], growth[worst])


def _norms(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, int | None]]:
    """Each norm in order: its node, and the node (and which of its results) that is the residual stream there."""
    found: list[tuple[fx.Node, fx.Node, int | None]] = []
    for node in graph.nodes:
        if is_call(node, rms_norm, rms_norm_quant):
            found.append((node, bind(node).x, None))
        elif is_call(node, aten.pow.Tensor_Scalar) and bind(node).exponent == 2:  # a norm that isn't lifted (yet)
            source = bind(node).self
            while source.target in CASTS:
                source = bind(source).self
            found.append((node, source, None))
        else:
            found.extend((node, node, place) for op, place in _STREAM_RESULT if is_call(node, op))
    return found


def _dtype_of(norm: fx.Node) -> torch.dtype:
    """The model's dtype, told from the weight of a norm; what a norm that isn't lifted reads is never scaled."""
    return bind(norm).weight.meta["val"].dtype if has_operand(norm, "weight") else torch.float32


def _places(graph: fx.Graph) -> list[str]:
    """What lies in front of each norm and, last, of the logits: a norm's layer tells what the next value of the
    stream comes from.
    """
    layers, seen, places = graph_layers(graph), set[int](), [layer_name(HEAD)]
    for norm, _, _ in _norms(graph):
        layer = layers[norm]
        part = "" if layer in (HEAD, TAIL) else " MLP" if layer in seen else " attention"
        places.append(layer_name(layer) + part)
        seen.add(layer)
    return places


class _Runner:
    """Runs graphs on the same inputs and weights; weights that a pass left alone are made once."""

    def __init__(self, state: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
        self._state, self._inputs = {name: tensor.detach() for name, tensor in state.items()}, inputs
        self._made: dict[Recipe, torch.Tensor] = {}
        if "slot_mapping" not in inputs or "block_table" not in inputs:
            raise ValueError(
                "the ledger runs graphs over a paged KV cache: give slot_mapping and block_table among the inputs"
            )
        self._pages = max(int(inputs["slot_mapping"].max()) // PAGE_SIZE, int(inputs["block_table"].max())) + 1

    def tensors(self, graph_module: fx.GraphModule) -> dict[str, torch.Tensor]:
        """Placeholder name -> tensor, with KV caches of zeros."""
        memo: dict[Recipe, Any] = {}
        recipes = {
            node.name: node.meta["recipe"] for node in placeholders(graph_module.graph) if node.meta["kind"] != "input"
        }
        self._made = {
            recipe: self._made[recipe] if recipe in self._made else self._make(recipe, memo)
            for recipe in recipes.values()
        }
        tensors = {name: self._made[recipe] for name, recipe in recipes.items()}
        for node in placeholders(graph_module.graph):
            if node.name in self._inputs:
                tensors[node.name] = self._inputs[node.name]
            elif dimensions_of(node.name) == ("NP",):
                tensors[node.name] = torch.zeros(
                    (self._pages, *map(int, node.meta["val"].shape[1:])), dtype=node.meta["val"].dtype
                )
            elif node.name not in tensors:
                raise ValueError(f"no tensor is given for the graph's input {node.name!r}")
        return tensors

    def run(self, graph_module: fx.GraphModule) -> _Run:
        """Logits in fp32, and the residual stream in front of each norm."""
        tensors = self.tensors(graph_module)
        norms = _norms(graph_module.graph)
        interpreter = _Recorder(graph_module, [(node, result) for _, node, result in norms])
        with torch.no_grad():
            result = interpreter.run(*(tensors[node.name] for node in placeholders(graph_module.graph)))
        return _Run(
            _logits(result),
            [residual_in_fp32(interpreter.kept[node, place], _dtype_of(norm)) for norm, node, place in norms],
        )

    def _make(self, recipe: Recipe, memo: dict[Recipe, Any]) -> torch.Tensor:
        return materialize(recipe, self._state.__getitem__, memo).contiguous()


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps some nodes' values: `wanted` are (node, which result)."""

    def __init__(self, graph_module: fx.GraphModule, wanted: Sequence[tuple[fx.Node, int | None]]) -> None:
        super().__init__(graph_module, graph=graph_module.graph)
        self.wanted = list(wanted)
        self.kept: dict[tuple[fx.Node, int | None], torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if is_check(n):
            return None  # it compares with what tracing has seen, such as the meta device
        value = super().run_node(n)
        for key in self.wanted:
            if key[0] is n:
                self.kept[key] = (value if key[1] is None else value[key[1]]).detach().clone()
        return value


def _logits(result: Any) -> torch.Tensor:
    found = [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
    if len(found) != 1 or found[0].dim() != 2:
        raise ValueError(
            f"the ledger compares one matrix of logits, the graph returns {[tuple(value.shape) for value in found]}"
        )
    return found[0].float().clone()
