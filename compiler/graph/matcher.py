"""A pattern matcher over FX nodes; a near-miss reports the difference.

    x, weight = any_("x"), any_("weight")
    wide = cast(x)
    RMS_NORM = weight * cast(wide * call(aten.rsqrt.default, call(aten.mean.dim, call(aten.pow.Tensor_Scalar, wide, 2),
    [-1], True) + const("eps")))

`+` and `*` match in either order. `cast(p)` and `views(p)` match `p` through any number of dtype conversions or views.
A name binds to the same node (or number) everywhere in a pattern. Nodes inside a match, except its root, must have no
reader outside of it, since the match will be replaced; views and casts may have one.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .nodes import CASTS, VIEWS, aten

ADDITIONS = (aten.add.Tensor, operator.add)
PRODUCTS = (aten.mul.Tensor, operator.mul)


@dataclass
class Match:
    """Result of a pattern: `match["x"]` is the value of the name `x`.

    root   the node to replace
    nodes  all nodes from the root to the named values
    """

    root: fx.Node
    bound: dict[str, Any] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def get(self, name: str) -> Any:
        """Return the value of `name`, or None if an alternative without this name matched."""
        return self.bound.get(name)

    def _copy(self) -> "Match":
        return Match(self.root, dict(self.bound), list(self.nodes))


class Mismatch:
    """The best attempt of a pattern: number of matched nodes, and the first difference."""

    def __init__(self) -> None:
        self.depth = -1
        self.reason = ""
        self.seen: set[fx.Node] = set()

    def note(self, state: Match, reason: str) -> None:
        """Store `reason` if this attempt has matched more nodes than the earlier ones."""
        self.seen.update(state.nodes)
        if len(state.nodes) > self.depth:
            self.depth, self.reason = len(state.nodes), reason


class Pattern:
    """A pattern for a node or an argument."""

    def match(self, value: Any, state: Match, miss: Mismatch) -> Iterator[Match]:
        """Yield all ways in which `value` matches, as extended copies of `state`."""
        raise NotImplementedError

    def __add__(self, other: Any) -> "Pattern":
        return Call(ADDITIONS, (self, other), commutative=True)

    def __mul__(self, other: Any) -> "Pattern":
        return Call(PRODUCTS, (self, other), commutative=True)


@dataclass
class Name(Pattern):
    """Bind a name to any node (or to a number, for `const`)."""

    name: str
    wants: Callable[[Any], bool]
    kind: str

    def match(self, value: Any, state: Match, miss: Mismatch) -> Iterator[Match]:
        if self.name in state.bound:
            if state.bound[self.name] is value or (not isinstance(value, fx.Node) and state.bound[self.name] == value):
                yield state
            else:
                miss.note(state, f"{self.name} is both {state.bound[self.name]} and {value}")
        elif self.wants(value):
            found = state._copy()
            found.bound[self.name] = value
            yield found
        else:
            miss.note(state, f"{value} is not {self.kind} for {self.name}")


@dataclass
class Call(Pattern):
    """A call_function node with one of `targets`; `args` are patterns or literals, `name` binds the node itself."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    commutative: bool = False
    name: str | None = None

    def match(self, value: Any, state: Match, miss: Mismatch) -> Iterator[Match]:
        if not isinstance(value, fx.Node) or value.op != "call_function" or value.target not in self.targets:
            wanted = " or ".join(str(target) for target in self.targets)
            miss.note(state, f"expected {wanted}, found {describe(value)}")
            return
        if len(_args(value)) < len(self.args):
            miss.note(state, f"{value} has {len(_args(value))} arguments, not {len(self.args)}")
            return
        found = state._copy()
        found.nodes.append(value)
        if self.name is not None:
            found.bound[self.name] = value
        orders = [self.args, self.args[::-1]] if self.commutative else [self.args]
        for order in orders:
            yield from _match_all(order, _args(value), found, miss)


@dataclass
class Through(Pattern):
    """Match through any number of nodes with one of `targets`, along their first argument."""

    targets: frozenset[Any]
    inner: Pattern

    def match(self, value: Any, state: Match, miss: Mismatch) -> Iterator[Match]:
        if isinstance(value, fx.Node) and value.op == "call_function" and value.target in self.targets:
            found = state._copy()
            found.nodes.append(value)
            yield from self.match(_args(value)[0], found, miss)
        yield from self.inner.match(value, state, miss)


@dataclass
class Either(Pattern):
    """Match the first of several spellings."""

    choices: tuple[Pattern, ...]

    def match(self, value: Any, state: Match, miss: Mismatch) -> Iterator[Match]:
        for choice in self.choices:
            yield from choice.match(value, state, miss)


def any_(name: str) -> Pattern:
    """Match any node and bind it to `name`."""
    return Name(name, lambda value: isinstance(value, fx.Node), "a node")


def const(name: str) -> Pattern:
    """Match any number in the graph and bind it to `name`."""
    return Name(name, lambda value: isinstance(value, int | float), "a number")


def call(target: Any, *args: Any, name: str | None = None) -> Pattern:
    """Match a call of `target` (or of one of several) with these leading arguments."""
    return Call(target if isinstance(target, tuple) else (target,), args, name=name)


def cast(inner: Pattern) -> Pattern:
    """Match `inner` through any number of dtype conversions."""
    return Through(CASTS, inner)


def views(inner: Pattern) -> Pattern:
    """Match `inner` through any number of views."""
    return Through(VIEWS, inner)


def either(*choices: Pattern) -> Pattern:
    """Match the first of several spellings."""
    return Either(choices)


def describe(value: Any) -> str:
    """Return a node as `target (name)`, anything else as its repr."""
    if not isinstance(value, fx.Node):
        return repr(value)
    return f"{value.op} {value.name}" if value.op != "call_function" else f"{value.target} ({value.name})"


def _args(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments, with a narrower type than FX's."""
    return node.args


def _match_all(patterns: Any, values: Any, state: Match, miss: Mismatch) -> Iterator[Match]:
    """Match each pattern with the value at its index; further values are ignored."""
    if not patterns:
        yield state
        return
    for found in _match_value(patterns[0], values[0], state, miss):
        yield from _match_all(patterns[1:], values[1:], found, miss)


def _match_value(pattern: Any, value: Any, state: Match, miss: Mismatch) -> Iterator[Match]:
    if isinstance(pattern, Pattern):
        yield from pattern.match(value, state, miss)
    elif isinstance(pattern, list | tuple):
        if isinstance(value, list | tuple) and len(value) == len(pattern):
            yield from _match_all(pattern, value, state, miss)
        else:
            miss.note(state, f"expected a list of {len(pattern)}, found {describe(value)}")
    elif not isinstance(value, fx.Node) and value == pattern:
        yield state
    else:
        miss.note(state, f"expected {pattern!r}, found {describe(value)}")


def outside_use(match: Match) -> str | None:
    """Return the reader that prevents the replacement of a match ("unsqueeze_3 is also used by mul_10"), or None."""
    inside = set(match.nodes)
    for node in match.nodes:
        if node is match.root or node.target in VIEWS or node.target in CASTS:
            continue
        for user in node.users:
            if user not in inside:
                return f"{node.name} is also used by {user.name}"
    return None


def find(
    graph: fx.Graph, pattern: Pattern, anchor: Any = None, where: Callable[[Match], str | None] = lambda match: None
) -> tuple[list[Match], list[str]]:
    """Return all matches of `pattern`, and a reason for each near-miss.

    A near-miss is an unmatched call of `anchor`, the op that identifies the idiom. `where` may return a reason to
    refuse a match. Matches don't overlap: the first one in the graph is used.
    """
    matches: list[Match] = []
    taken: set[fx.Node] = set()
    reasons: dict[fx.Node, tuple[int, str]] = {}

    def near_miss(nodes: set[fx.Node], depth: int, reason: str) -> None:
        for node in nodes:
            if node.target == anchor and node not in taken and depth > reasons.get(node, (-1, ""))[0]:
                reasons[node] = (depth, reason)

    for root in graph.nodes:
        if root.op != "call_function" or root in taken:
            continue
        miss = Mismatch()
        for match in pattern.match(root, Match(root), miss):
            reason = where(match) or outside_use(match)
            if reason is None and not taken.intersection(match.nodes):
                matches.append(match)
                taken.update(match.nodes)
                break
            near_miss(set(match.nodes), len(match.nodes), reason or f"{root.name} overlaps another match")
        else:
            near_miss(miss.seen, miss.depth, f"at {root.name}: {miss.reason}")
    rejected = [
        f"{node.name}: {reasons[node][1] if node in reasons else 'no pattern reaches it'}"
        for node in graph.nodes
        if node.target == anchor and node not in taken
    ]
    return matches, rejected
