"""One model over several ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from ....ops.attention.append_kv import append_kv
from ....ops.attention.paged_attention import paged_attention
from ....ops.attention.rope import rope
from ....ops.collectives.all_gather import all_gather
from ....ops.collectives.all_reduce import all_reduce
from ....ops.collectives.group import tensor_parallel_group
from ....ops.elementwise.rms_norm import rms_norm
from ....ops.lora.lora import lora
from ...graph.branches import Branch, branch_of
from ...graph.nodes import aten, bind, insert_call, is_call, shape_of, slice_range, split_bias, split_delta
from ...graph.slices import Share, SliceError
from ...options import TENSOR_PARALLEL, OptionError
from ..base import Context, PassReport
from .shard_parts import Projection, propagate, split_cache, split_columns, split_heads, split_rows

ALIGNMENT = 16  # of rows and columns of a linear in eight bits


class _Refused(Exception):
    """Why the graph is left whole."""


def shard(graph: fx.Graph, context: Context) -> PassReport:
    """Each rank has its share of the heads, of the MLP's columns and of the vocabulary, and what o and down make of it
    is added up over the ranks.

    before  q_k_v = aten.linear(x, w_qkv); ...; o = aten.linear(attention, w_o) + sidestream.lora(attention, a, b, ...)
            gate_up = aten.linear(y, w_gate_up); ...; down = aten.linear(h, w_down); ...; logits = aten.linear(z, w)
    after   the same with a rank's rows of w_qkv, w_gate_up and w (and of B), and its columns of w_o and w_down (and of
            A); all_reduce = sidestream.all_reduce(o, "tp2"); all_reduce_1 = sidestream.all_reduce(down, "tp2"); ...
            all_gather = sidestream.all_gather(logits, "tp2", 128256), unless gather_logits is off

    A LoRA delta by columns needs all of A, one by rows all of B: it is then a partial sum like the linear's, and both
    are reduced at once. A bias by rows is added by rank 0. KV heads that are fewer than the ranks are held by several.
    Recipes cut weights before anything is computed from them, so that a rank reads its share of the checkpoint only.
    Runs with tensor_parallel above 1, and counts collectives: two a layer, and one for the logits. Leaves the graph
    whole when it holds a projection whose place in a layer it cannot tell. Raises OptionError for sizes that
    `tensor_parallel` does not divide.
    """
    report, options = PassReport(0), context.options
    world = options.tensor_parallel
    if world == 1:
        return report
    found = _Found(world, options.tensor_parallel_rank, ALIGNMENT if options.quantizes else 1)
    try:
        found.look(graph)
    except _Refused as refusal:
        report.rejected.append(str(refusal))
        return report
    try:
        for branch, projections in found.columns.values():
            split_columns(graph, branch, projections)
        for branch in found.rows:
            split_rows(graph, branch, found.share)
    except SliceError as error:
        raise OptionError(
            f"tensor_parallel={world} would cut {error} apart; choose a smaller tensor_parallel"
        ) from error
    for view, share in found.views.items():
        split_heads(view, share)
    for cache, share in found.caches.items():
        split_cache(cache, share)
    propagate(graph)
    group = tensor_parallel_group(world)
    for branch in found.rows:
        _insert_after(graph, branch.joined, all_reduce, group)
    if options.gather_logits:
        _insert_after(graph, found.head, all_gather, group, found.vocabulary)
    report.matches = len(found.rows) + options.gather_logits
    return report


def _insert_after(graph: fx.Graph, node: fx.Node, op: object, *arguments: object) -> None:
    """A call of `op` on what `node` makes, for all who read it."""
    with graph.inserting_after(node):
        new = insert_call(graph, op, (node, *arguments), like=node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


@dataclass
class _Found:
    """What of a graph is to be split, and how; `look` changes nothing.

    columns   node that holds a packed projection's result -> its branch, and the projections in it
    rows      branches whose results are partial sums
    views     views of results as heads
    caches    KV caches
    head      the linear that makes logits
    """

    world: int
    rank: int
    alignment: int
    columns: dict[fx.Node, tuple[Branch, list[Projection]]] = field(default_factory=dict)
    rows: list[Branch] = field(default_factory=list)
    views: dict[fx.Node, Share] = field(default_factory=dict)
    caches: dict[fx.Node, Share] = field(default_factory=dict)

    @property
    def share(self) -> Share:
        """This rank's share of what the ranks divide equally."""
        return Share(self.rank, self.world)

    def look(self, graph: fx.Graph) -> None:
        """Raises _Refused or OptionError."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        appends = {bind(node).kv_cache: node for node in calls if is_call(node, append_kv)}
        for node in calls:
            if is_call(node, paged_attention) and bind(node).kv_cache in appends:
                self._attention(node, appends[bind(node).kv_cache])
            elif is_call(node, aten.mul.Tensor):
                self._mlp(node)
        self._logits(graph)
        self._check_complete(calls)

    def _attention(self, attention: fx.Node, append: fx.Node) -> None:
        query, cache = bind(attention).q, bind(attention).kv_cache
        heads, kv_heads = int(shape_of(query)[1]), int(shape_of(cache)[1])
        self._check("attention heads", heads)
        self._check("KV heads", kv_heads, replicates=True)
        replicated = max(1, self.world // kv_heads)  # ranks that hold the same KV heads
        kv_share = Share(self.rank // replicated, self.world // replicated)
        self._heads(query, self.share)
        for value in (bind(append).k, bind(append).v):
            self._heads(value, kv_share)
        self.caches[cache] = kv_share
        self.rows.append(self._row(attention))

    def _mlp(self, product: fx.Node) -> None:
        pair = bind(product).self, bind(product).other
        gates = [value for value in pair if is_call(value, aten.silu.default)]
        if len(gates) != 1:
            return
        up = pair[1] if pair[0] is gates[0] else pair[0]
        for value in (bind(gates[0]).self, up):
            self._column(value, self.share)
        width = int(shape_of(product)[-1])
        self._check("columns of the MLP (intermediate_size)", width)
        if width // self.world % self.alignment:
            raise OptionError(
                f"tensor_parallel={self.world} leaves a rank {width // self.world} columns of the MLP "
                f"(intermediate_size {width}), and eight bits need multiples of {self.alignment}; choose a smaller "
                "tensor_parallel, or precision='bf16'"
            )
        self.rows.append(self._row(product))

    def _logits(self, graph: fx.Graph) -> None:
        returned = next(node for node in graph.nodes if node.op == "output").all_input_nodes
        if len(returned) != 1 or not is_call(returned[0], aten.linear.default):
            raise _Refused(
                f"{', '.join(node.name for node in returned)}: the graph does not return one linear's logits"
            )
        self.head = returned[0]
        branch = branch_of(self.head)
        self.vocabulary = branch.width
        share = Share(self.rank, self.world, self.alignment)
        self.columns[self.head] = branch, [Projection(0, branch.width, share)]

    def _heads(self, value: fx.Node, share: Share) -> None:
        """From what attention reads back to the projection that made it."""
        while True:
            if is_call(value, rope, rms_norm):
                value = bind(value).x
            elif is_call(value, aten.view.default) and len(shape_of(value)) == 3:
                self.views[value] = share
                value = bind(value).self
            else:
                return self._column(value, share)

    def _column(self, value: fx.Node, share: Share) -> None:
        source, start, end = slice_range(value) or (value, 0, int(shape_of(value)[-1]))
        linear, _ = split_bias(split_delta(source)[0])
        if not is_call(linear, aten.linear.default) or branch_of(linear).joined is not source:
            raise _Refused(f"{source.name} is no projection with its bias and LoRA (is lift_lora or lift_bias off?)")
        _, projections = self.columns.setdefault(source, (branch_of(linear), []))
        projections.append(Projection(start, end, share))

    def _row(self, source: fx.Node) -> Branch:
        """The projection that reads `source`."""
        linears = [user for user in source.users if is_call(user, aten.linear.default)]
        branch = branch_of(linears[0]) if len(linears) == 1 else None
        others = [user.name for user in source.users if branch is None or user not in (branch.linear, branch.lora)]
        if branch is None or others:
            raise _Refused(f"{source.name} is not read by one projection alone, but by {', '.join(others)}")
        return branch

    def _check_complete(self, calls: Iterable[fx.Node]) -> None:
        """Every linear and every LoRA branch has its place, and every column of a packed one."""
        known = {node for branch, _ in self.columns.values() for node in (branch.linear, branch.lora)}
        known |= {node for branch in self.rows for node in (branch.linear, branch.lora)}
        for node in calls:
            if is_call(node, aten.linear.default, lora) and node not in known:
                raise _Refused(f"{node.name} is neither a projection of attention or of an MLP nor the last linear")
        for source, (branch, projections) in self.columns.items():
            projections.sort(key=lambda each: each.start)
            ends = [0, *(each.end for each in projections)]
            if [each.start for each in projections] != ends[:-1] or ends[-1] != branch.width:
                raise _Refused(f"{source.name}: columns {projections} are not all of its {branch.width}")

    def _check(self, what: str, count: int, replicates: bool = False) -> None:
        """Raises OptionError where the ranks cannot have equal shares of `count`; `replicates`: several may have the
        same.
        """
        fits = [world for world in TENSOR_PARALLEL if count % world == 0 or (replicates and world % count == 0)]
        if self.world not in fits:
            raise OptionError(
                f"tensor_parallel={self.world} does not divide the model's {count} {what}; choose "
                f"{' or '.join(map(str, fits))}"
            )
