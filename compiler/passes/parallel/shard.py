"""Split the model over ranks: a rank's share of projections, heads and KV caches, and the collectives between them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ....ops.attention.append_kv import append_kv
from ....ops.attention.paged_attention import paged_attention
from ....ops.attention.rope import rope
from ....ops.collectives.all_gather import all_gather
from ....ops.collectives.all_reduce import all_reduce
from ....ops.collectives.tensor_parallel_group import tensor_parallel_group
from ....ops.elementwise.rms_norm import rms_norm
from ....ops.lora.adjust import lora_adjust
from ....ops.lora.lora import lora
from ....ops.moe.combine import moe_combine
from ....ops.moe.expert_linear import expert_linear
from ....ops.moe.route import moe_route
from ...graph.nodes import (
    DELTAS,
    aten,
    bind,
    fake_mode_of,
    insert_call,
    insert_placeholder,
    is_call,
    set_operands,
    shape_of,
    slice_range,
    split_bias,
    split_delta,
    value_of,
)
from ...graph.projections import Branch, branch_of
from ...graph.recipe import Recipe, Share, SliceError, cat, scale, sliced, zeros
from ...options import TENSOR_PARALLEL, OptionError
from ..base import Context, PassReport, Refused

ALIGNMENT = 16  # rows and columns of a linear in eight bits are multiples of this


@dataclass(frozen=True)
class Projection:
    """Output columns `start` to `end` of a packed linear, and a rank's share of them."""

    start: int
    end: int
    share: Share

    @property
    def width(self) -> int:
        """Columns on all ranks."""
        return self.end - self.start

    @property
    def own(self) -> int:
        """Columns on this rank."""
        return self.share.of(self.width)


def shard(graph: fx.Graph, context: Context) -> PassReport:
    """Split heads, MLP columns and vocabulary over the ranks, and sum the partial results of o and down.

    before  q_k_v = aten.linear(x, w_qkv); ...; o = aten.linear(attention, w_o) + sidestream.lora(attention, a, b, ...)
            gate_up = aten.linear(y, w_gate_up); ...; down = aten.linear(h, w_down); ...; logits = aten.linear(z, w)
    after   the same with a rank's rows of w_qkv, w_gate_up and w (and of B), and its columns of w_o and w_down (and of
            A); all_reduce = sidestream.all_reduce(o, "tp2"); all_reduce_1 = sidestream.all_reduce(down, "tp2"); ...
            all_gather = sidestream.all_gather(logits, "tp2", 128256), unless gather_logits is off

    A column-parallel LoRA delta needs all of A. A row-parallel one needs all of B, is a partial sum like the linear's,
    and is reduced with it. Rank 0 adds a row-parallel bias and an adapter's shift. With fewer KV heads than ranks,
    several ranks have the same heads. Each rank has its columns of all experts, whose results are summed over the ranks
    after `moe_combine`, and whole routers. Recipes slice first, so that a rank reads only its share of the checkpoint.
    Runs with tensor_parallel above 1. The matches are collectives: two per layer, and one for the logits. Leaves the
    whole graph if it has an unknown projection. Raises OptionError for sizes that `tensor_parallel` does not divide.
    """
    report, options = PassReport(0), context.options
    world = options.tensor_parallel
    if world == 1:
        return report
    found = _Parts(world, options.tensor_parallel_rank, ALIGNMENT if options.quantizes else 1)
    try:
        found.find(graph)
    except Refused as refusal:
        report.rejected.append(str(refusal))
        return report
    try:
        for branch, projections in found.columns.values():
            split_columns(graph, branch, projections)
        for branch in found.rows:
            split_rows(graph, branch, found.share)
    except SliceError as error:
        raise OptionError(f"tensor_parallel={world} would split {error}; choose a smaller tensor_parallel") from error
    for view, share in found.views.items():
        split_heads(view, share)
    for cache, share in found.caches.items():
        split_cache(cache, share)
    propagate(graph)
    group = tensor_parallel_group(world)
    for branch in found.rows:
        combine = next((user for user in branch.joined.users if is_call(user, moe_combine)), None)
        _insert_after(graph, combine or branch.joined, all_reduce, group)
    if options.gather_logits:
        _insert_after(graph, found.head, all_gather, group, found.vocabulary)
    report.matches = len(found.rows) + options.gather_logits
    return report


def _insert_after(graph: fx.Graph, node: fx.Node, op: object, *arguments: object) -> None:
    """Insert a call of `op` between `node` and all its readers."""
    with graph.inserting_after(node):
        new = insert_call(graph, op, (node, *arguments), like=node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


@dataclass
class _Parts:
    """The parts of a graph to split; `find` does not change the graph.

    columns   result node of a packed projection -> its branch, and the projections in it
    rows      branches with partial sums as results
    views     views of results as heads
    caches    KV caches
    head      the linear of the logits
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
        """This rank's share of parts that the ranks divide equally."""
        return Share(self.rank, self.world)

    def find(self, graph: fx.Graph) -> None:
        """Find all parts. Raises Refused or OptionError."""
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
        replicated = max(1, self.world // kv_heads)  # ranks with the same KV heads
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
        self.rows.append(self._row(product))
        is_sparse = is_call(self.rows[-1].linear, expert_linear)
        part, size = ("each expert", "intermediate size") if is_sparse else ("the MLP", "intermediate_size")
        width = int(shape_of(product)[-1])
        self._check(f"columns of {part} ({size})", width)
        if width // self.world % self.alignment:
            raise OptionError(
                f"tensor_parallel={self.world} gives each rank {width // self.world} columns of {part} "
                f"({size} {width}), but eight bits need a multiple of {self.alignment}; choose a smaller "
                "tensor_parallel, or precision='bf16'"
            )

    def _logits(self, graph: fx.Graph) -> None:
        returned = next(node for node in graph.nodes if node.op == "output").all_input_nodes
        linear = split_delta(returned[0])[0] if len(returned) == 1 else None
        if linear is None or not is_call(linear, aten.linear.default):
            raise Refused(f"{', '.join(node.name for node in returned)}: the graph does not return one linear's logits")
        self.head = returned[0]
        branch = branch_of(linear)
        self.vocabulary = branch.width
        share = Share(self.rank, self.world, self.alignment)
        self.columns[self.head] = branch, [Projection(0, branch.width, share)]

    def _heads(self, value: fx.Node, share: Share) -> None:
        """Follow attention's operand back to its projection."""
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
        linear = bind(linear).y if is_call(linear, lora_adjust) else linear
        if not is_call(linear, aten.linear.default, expert_linear) or branch_of(linear).joined is not source:
            raise Refused(f"{source.name} is not a projection with its bias and LoRA (is lift_lora or lift_bias off?)")
        _, projections = self.columns.setdefault(source, (branch_of(linear), []))
        projections.append(Projection(start, end, share))

    def _row(self, source: fx.Node) -> Branch:
        """Return the only projection that reads `source`. Raises Refused."""
        linears = [user for user in source.users if is_call(user, aten.linear.default, expert_linear)]
        branch = branch_of(linears[0]) if len(linears) == 1 else None
        others = [user.name for user in source.users if branch is None or user not in (branch.linear, branch.lora)]
        if branch is None or others:
            raise Refused(f"{source.name} has other readers than one projection: {', '.join(others)}")
        return branch

    def _check_complete(self, calls: Iterable[fx.Node]) -> None:
        """Raise Refused unless every linear, LoRA branch and packed column was found."""
        found = {node for branch, _ in self.columns.values() for node in (branch.linear, branch.lora)}
        found |= {node for branch in self.rows for node in (branch.linear, branch.lora)}
        for node in calls:
            routes = is_call(node, lora) and all(is_call(user, moe_route) for user in node.users)
            if is_call(node, aten.linear.default, expert_linear, *DELTAS) and node not in found and not routes:
                raise Refused(f"{node.name} is not a projection of attention or of an MLP, and not the last linear")
        for source, (branch, projections) in self.columns.items():
            projections.sort(key=lambda each: each.start)
            ends = [0, *(each.end for each in projections)]
            if [each.start for each in projections] != ends[:-1] or ends[-1] != branch.width:
                raise Refused(f"{source.name}: columns {projections} are not all of its {branch.width}")

    def _check(self, parts: str, count: int, replicates: bool = False) -> None:
        """Raise OptionError unless the ranks can have equal shares of `count`; `replicates`: or the same share."""
        fits = [world for world in TENSOR_PARALLEL if count % world == 0 or (replicates and world % count == 0)]
        if self.world not in fits:
            raise OptionError(
                f"tensor_parallel={self.world} does not divide the model's {count} {parts}; choose "
                f"{' or '.join(map(str, fits))}"
            )


def split_columns(graph: fx.Graph, branch: Branch, projections: list[Projection]) -> None:
    """Slice a packed linear to a rank's share of each projection: rows of weight, bias and B. Raises SliceError."""
    dim, b_dim = (-2, -2) if is_call(branch.linear, expert_linear) else (0, 1)
    _exchange(graph, branch.linear, "weight", dim, _own_rows(branch.weight, dim, projections))
    if branch.bias is not None:
        total = next(user for user in branch.bias.users if (branch.adjust or branch.linear) in user.all_input_nodes)
        argument = bind(total).names_of(branch.bias)[0]
        _exchange(graph, total, argument, 0, _own_rows(branch.bias, 0, projections))
    if branch.adjust is not None:
        for name, stack in _stacks(branch.adjust):
            _exchange(graph, branch.adjust, name, 1, _own_rows(stack, 1, projections))
    if branch.lora is not None:
        _exchange(graph, branch.lora, "b", b_dim, _own_rows(bind(branch.lora).b, b_dim, projections))
        set_operands(branch.lora, slices=[each.own for each in projections])
    offset, moved = 0, {}
    for each in projections:
        moved[each.start, each.end] = offset, offset + each.own
        offset += each.own
    if branch.adjust is not None and bind(branch.adjust).rotate:
        first, end = moved[bind(branch.adjust).first, bind(branch.adjust).end]
        set_operands(branch.adjust, first=first, end=end)
    for user in list(branch.joined.users):
        cut = slice_range(user)
        if cut is not None:
            start, end = moved[cut[1:]]
            set_operands(user, start=start, end=end)


def split_rows(graph: fx.Graph, branch: Branch, share: Share) -> None:
    """Slice a linear's weight and A to a rank's columns. Only rank 0 adds the bias and a shift. Raises SliceError."""
    width = int(shape_of(branch.weight)[-1])
    dim, a_dim = (-1, -1) if is_call(branch.linear, expert_linear) else (1, 2)
    weight = sliced(branch.weight.meta["recipe"], dim, share, width), share.of(width)
    _exchange(graph, branch.linear, "weight", dim, weight)
    shift = None if branch.adjust is None else bind(branch.adjust).shift
    if branch.bias is not None and share.rank:
        value = branch.bias.meta["val"]
        branch.bias.meta["recipe"] = zeros(tuple(int(size) for size in value.shape), value.dtype)
    if shift is not None and share.rank:
        shift.meta["recipe"] = scale(shift.meta["recipe"], 0.0)
    if branch.lora is not None:
        a = bind(branch.lora).a
        _exchange(graph, branch.lora, "a", a_dim, (sliced(a.meta["recipe"], a_dim, share, width), share.of(width)))


def _stacks(adjust: fx.Node) -> list[tuple[str, fx.Node]]:
    """Return the arguments of an adjustment that are stacks."""
    stacks = ((name, getattr(bind(adjust), name)) for name in ("gain", "shift"))
    return [(name, stack) for name, stack in stacks if stack is not None]


def split_heads(view: fx.Node, share: Share) -> None:
    """Set the heads of a view [T, heads, D] to a share of them."""
    size = list(bind(view).size)
    set_operands(view, size=[*size[:-2], share.of(int(shape_of(view)[-2])), size[-1]])


def split_cache(cache: fx.Node, share: Share) -> None:
    """Set a KV cache's heads to a share of them; meta["heads"] becomes (share, total)."""
    value = cache.meta["val"]
    heads = int(value.shape[1])
    cache.meta.update(val=value.new_empty((value.shape[0], share.of(heads), *value.shape[2:])), heads=(share, heads))


def propagate(graph: fx.Graph) -> None:
    """Recompute every call's fake value from the graph's inputs."""
    mode = fake_mode_of(graph)
    if mode is None:
        raise ValueError("the graph holds no fake tensors; capture it first")
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function":
                target: Any = node.target
                node.meta["val"] = target(*value_of(node.args), **value_of(node.kwargs))


def _own_rows(weight: fx.Node, dim: int, projections: list[Projection]) -> tuple[Recipe, int]:
    """Return the recipe of a rank's share of each packed projection, and its number of rows."""
    recipe = weight.meta["recipe"]
    parts: tuple[Recipe, ...] = (recipe,)
    if dim < 0:  # parts of one tensor of experts have equal widths: each is `world` shares of it
        count, (width, share) = len(projections), (projections[0].width, projections[0].share)
        shares = [Share(place * share.world + share.rank, count * share.world) for place in range(count)]
        return cat(dim, [sliced(recipe, dim, each, count * width) for each in shares]), count * share.of(width)
    if len(projections) > 1:
        parts = recipe.args if recipe.op == "cat" and recipe.attrs["dim"] == dim else ()
    if len(parts) != len(projections):
        raise SliceError(f"{weight.name}, which is not packed from {len(projections)} weights,")
    own = [sliced(part, dim, each.share, each.width) for part, each in zip(parts, projections, strict=True)]
    return cat(dim, own), sum(each.own for each in projections)


def _exchange(graph: fx.Graph, reader: fx.Node, argument: str, dim: int, part: tuple[Recipe, int]) -> None:
    """Replace an argument by `part` (recipe, size along `dim`); other readers of the weight keep it unchanged."""
    whole: fx.Node = getattr(bind(reader), argument)
    recipe, size = part
    value = whole.meta["val"]
    shape = tuple(size if place == dim % value.dim() else each for place, each in enumerate(value.shape))
    if len(whole.users) == 1:
        whole.meta.update(val=value.new_empty(shape), recipe=recipe)
        return
    name, kind = f"{whole.name}_share", whole.meta["kind"]
    own = insert_placeholder(graph, name, kind, shape, value.dtype, after=whole, recipe=recipe)
    set_operands(reader, **{argument: own})
