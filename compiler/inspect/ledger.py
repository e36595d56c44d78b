"""The numerics ledger: the change of the logits by each pass, so that a bug is attributed to a pass.

After every pass the graph runs on the same inputs, node by node with the CPU's references; at the end it also runs as a
program. The passes of decode programs (`DECODE_PASSES`) are measured with programs: a decode step of the sequences
without adapter, with the cache that the program has filled; then, for passes on LoRA, a step of all sequences.
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
from ...ops.elementwise.combine_rms_norm import combine_add_rms_norm, combine_add_rms_norm_quant
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
# op -> index of the residual stream in its results
_STREAM_RESULT = (
    *((add_rms_norm, 1), (add_rms_norm_quant, 3), (all_reduce_add_rms_norm_quant, 3)),
    *((combine_add_rms_norm, 1), (combine_add_rms_norm_quant, 3)),
)


@dataclass(frozen=True)
class LedgerRow:
    """The change of a batch's logits by one pass.

    name, tier   the pass and its tier; `(capture)`: the captured graph, compared with a reference of other precision;
                 `(program)`: the program of the last graph; suffix ` (decode)`: a pass of decode programs;
                 ` (decode, adapters)`: the same in a program with LoRA
    matches      number of matches
    added        relative RMSE of the logits, compared with the graph before this pass
    total        relative RMSE of the logits, compared with the reference: the graph before all passes, or the caller's
    mean_kl      mean over the tokens of KL(before || after), in nats
    worst_token  row of the logits with the largest KL; None if all are equal
    worst_kl     KL of that row
    worst_layer  part of the model with the largest growth of the residual stream's relative error; "" if there is no
                 difference or the part is unknown
    growth       growth of the error there
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
    """Return one row per pass, in order, one for the program, and if possible one per pass of decode programs.

    `captured`   is not changed
    `inputs`     the graph's inputs on the CPU except KV caches: each run has new ones of its dtype, with scales
    `state`      the model's parameters and buffers (adapter stacks too) by name
    `reference`  logits [B, V] for the totals, such as the fp32 model's; default: those of the captured graph

    Raises the same errors as `compile` for options and counts, and ValueError for a missing input, or a result that is
    not logits.
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
    bound = BoundProgram(build_program(copy.graph_module, tensors, options), tensors, poison=True)
    program = _Run(_logits(bound.run()))
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
    """Run the last tokens of these sequences as a decode step, each time with one more pass of decode programs.

    `tensors`: those of the program that ran before; its caches contain all tokens. `truth`: the logits of every token.
    `lora`: return only rows of passes with matches.
    """
    if not sequences:
        return []
    base = list(sequences)
    last, count = tensors["query_start"][1:].long()[base] - 1, len(base)
    caches = next(tensor for name, tensor in tensors.items() if dimensions_of(name) == ("NP",))
    bucket = Bucket(count, count, len(caches), tensors["block_table"].shape[1], decode=True, lora=lora)
    steps = torch.arange(count + 1, dtype=torch.int32)
    by_token = ("input_ids", "positions", "slot_mapping", "adapter_index")
    inputs = {name: tensors[name][last] for name in by_token if name in tensors}
    inputs |= {name: tensors[name][base] for name in ("block_table", "context_lens")}
    inputs |= {"query_start": steps, "logits_indices": steps[:-1]}
    matches = _decode_matches(graph_module, bucket, options)
    present = [each for each in DECODE_PASSES if each.name in matches and (matches[each.name] or not lora)]
    rows: list[LedgerRow] = []
    before: _Run | None = None
    for number in range(len(present) + 1):
        chosen = replace(options, disable=(*options.disable, *(each.name for each in present[number:])))
        program = build_program(graph_module, bucket, chosen)
        after = _Run(_logits(BoundProgram(program, {**tensors, **inputs}, poison=True).run()))
        if before is not None:
            each = present[number - 1]
            name = each.name + (DECODE_LORA if lora else DECODE)
            count = _decode_matches(graph_module, bucket, chosen)[each.name]
            row = _row(name, each.tier, count, before, after, truth[last], [])
            rows.append(replace(row, worst_token=None if row.worst_token is None else int(last[row.worst_token])))
        before = after
    return rows


def _decode_matches(graph_module: fx.GraphModule, bucket: Bucket, options: CompileOptions) -> dict[str, int]:
    """Return the number of matches of each pass of a decode program."""
    records = run_static_passes(specialize(graph_module, bucket), options, H200_SMS, DECODE_PASSES)
    return {record.name: record.matches for record in records}


def largest(rows: Sequence[LedgerRow]) -> LedgerRow:
    """Return the row with the largest `added`; NaN counts as the largest."""
    return max(rows, key=lambda row: (row.added != row.added, row.added))


def as_json(rows: Sequence[LedgerRow]) -> dict[str, float]:
    """Return pass -> relative error, for `dump(ledger=...)`."""
    return {
        row.name: row.added
        for row in rows
        if row.name not in (CAPTURE, PROGRAM) and not row.name.endswith((DECODE, DECODE_LORA))
    }


def as_text(rows: Sequence[LedgerRow], tokens: Sequence[str] = ()) -> str:
    """Return the ledger as a table; `tokens` names the rows of the logits."""
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
    """Return sqrt(sum (got - want)^2 / sum want^2); 0 if both are zero."""
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
    """Return (part of the model where the stream's relative error grows most, growth); the last part is the logits."""
    first, second = [*before.streams, before.logits], [*after.streams, after.logits]
    if len(first) != len(places) or [value.shape for value in first] != [value.shape for value in second]:
        return "", 0.0
    errors = [0.0, *(relative_rmse(got, want) for got, want in zip(second, first, strict=True))]
    growth = [error - earlier for earlier, error in pairwise(errors)]
    # NaN counts as the largest growth, and the first one is returned
    worst = max(range(len(growth)), key=lambda place: (growth[place] != growth[place], growth[place]))
    return ("", 0.0) if growth[worst] <= 0.0 else (places[worst], growth[worst])


def _norms(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, int | None]]:
    """Return (norm, node of the residual stream there, index of its result or None) of each norm, in order."""
    found: list[tuple[fx.Node, fx.Node, int | None]] = []
    for node in graph.nodes:
        if is_call(node, rms_norm, rms_norm_quant):
            found.append((node, bind(node).x, None))
        elif is_call(node, aten.pow.Tensor_Scalar) and bind(node).exponent == 2:  # a norm that is not lifted
            source = bind(node).self
            while source.target in CASTS:
                source = bind(source).self
            found.append((node, source, None))
        else:
            found.extend((node, node, place) for op, place in _STREAM_RESULT if is_call(node, op))
    return found


def _dtype_of(norm: fx.Node) -> torch.dtype:
    """Return the model's dtype from a norm's weight; the input of an unlifted norm is never scaled."""
    name = next((each for each in ("weight", "gain") if has_operand(norm, each)), None)
    return torch.float32 if name is None else getattr(bind(norm), name).meta["val"].dtype


def _places(graph: fx.Graph) -> list[str]:
    """Return the names of the parts of the model that end at each norm, and of the last part, before the logits."""
    layers, seen, places = graph_layers(graph), set[int](), [layer_name(HEAD)]
    for norm, _, _ in _norms(graph):
        layer = layers[norm]
        part = "" if layer in (HEAD, TAIL) else " MLP" if layer in seen else " attention"
        places.append(layer_name(layer) + part)
        seen.add(layer)
    return places


class _Runner:
    """Run graphs on the same inputs and weights; weights with equal recipes are computed once."""

    def __init__(self, state: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
        self._state, self._inputs = {name: tensor.detach() for name, tensor in state.items()}, inputs
        self._made: dict[Recipe, torch.Tensor] = {}
        if "slot_mapping" not in inputs or "block_table" not in inputs:
            raise ValueError("the ledger needs slot_mapping and block_table among the inputs, for a paged KV cache")
        self._pages = max(int(inputs["slot_mapping"].max()) // PAGE_SIZE, int(inputs["block_table"].max())) + 1

    def tensors(self, graph_module: fx.GraphModule) -> dict[str, torch.Tensor]:
        """Return placeholder name -> tensor, with KV caches of zeros."""
        memo: dict[Recipe, Any] = {}
        loaded = [node for node in placeholders(graph_module.graph) if node.meta["kind"] != "input"]
        recipes = {node.name: node.meta["recipe"] for node in loaded}
        made = self._made
        self._made = {each: made[each] if each in made else self._make(each, memo) for each in recipes.values()}
        tensors = {name: self._made[recipe] for name, recipe in recipes.items()}
        for node in placeholders(graph_module.graph):
            if node.name in self._inputs:
                tensors[node.name] = self._inputs[node.name]
            elif dimensions_of(node.name) == ("NP",):
                value = node.meta["val"]
                tensors[node.name] = torch.zeros((self._pages, *map(int, value.shape[1:])), dtype=value.dtype)
            elif node.name not in tensors:
                raise ValueError(f"no tensor is given for the graph's input {node.name!r}")
        return tensors

    def run(self, graph_module: fx.GraphModule) -> _Run:
        """Return logits in fp32, and the residual stream before each norm."""
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
    """Run a graph and store the values of some nodes: `wanted` has (node, result index)."""

    def __init__(self, graph_module: fx.GraphModule, wanted: Sequence[tuple[fx.Node, int | None]]) -> None:
        super().__init__(graph_module, graph=graph_module.graph)
        self.wanted = list(wanted)
        self.kept: dict[tuple[fx.Node, int | None], torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if is_check(n):
            return None  # a check of properties during tracing, such as the meta device
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
