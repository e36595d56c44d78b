"""Says how the house stands: files per folder, which folder imports which, and what breaks its rules.

python -m sidestream.tools.pages.house            print rooms and arrows; exit code 1 when a rule is broken

All is read from the sources by `ast`; nothing is imported. An import is early when it runs with the module, late when
a function makes it, and for types when `if TYPE_CHECKING` guards it. The rules:
  floors    a folder imports its own floor's folder and lower floors, in whatever way (types alone may look up)
  circles   neither modules nor rooms import each other, early or late. A room is a folder; a file that lies in a floor
            itself is a room of its own, since a floor has its doors (api) and its common words (options) there
  rooms     a folder has at most 20 files of its own; compiler/passes and tools/quality may have more
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
FLOORS = {"ops": 1, "graphs": 2, "compiler": 2, "runtime": 3, "tools": 4}
MOST_FILES = 20
LARGE_ROOMS = ("compiler/passes", "tools/quality")
Kind = Literal["early", "late", "types"]


@dataclass(frozen=True, order=True)
class Import:
    """Module `source` imports module `target` (both as paths from the root, without .py) in line `line`."""

    source: str
    target: str
    line: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.source}.py:{self.line} imports {self.target}"


@dataclass(frozen=True)
class Circle:
    """Modules or rooms that reach each other, in order of names, and one import for every arrow between two."""

    places: tuple[str, ...]
    imports: tuple[Import, ...]

    def __str__(self) -> str:
        return "\n".join([" <-> ".join(self.places), *(f"    {one}" for one in self.imports)])


@dataclass(frozen=True)
class House:
    """The modules of every folder, and all imports between them."""

    modules: tuple[str, ...]
    imports: tuple[Import, ...]

    def rooms(self) -> dict[str, int]:
        """Folder -> files of its own."""
        found: dict[str, int] = defaultdict(int)
        for module in self.modules:
            found[folder(module)] += 1
        return dict(sorted(found.items()))

    def arrows(self, kind: Kind) -> dict[str, set[str]]:
        """Folder -> the folders that it imports in this way."""
        found: dict[str, set[str]] = {room: set() for room in self.rooms()}
        for one in self.imports:
            source, target = folder(one.source), folder(one.target)
            if one.kind == kind and source != target:
                found[source].add(target)
        return found

    def upward(self) -> list[str]:
        """Imports of a floor above, and between the folders of one floor."""
        return [str(one) for one in self.imports if one.kind != "types" and _rises(_top(one.source), _top(one.target))]

    def module_circles(self) -> list[Circle]:
        """Modules that import each other."""
        return self._circles(lambda module: module)

    def room_circles(self) -> list[Circle]:
        """Rooms that import each other."""
        return self._circles(room)

    def _circles(self, place: Callable[[str], str]) -> list[Circle]:
        arrows: dict[str, dict[str, Import]] = {place(module): {} for module in self.modules}
        for one in self.imports:
            source, target = place(one.source), place(one.target)
            if one.kind != "types" and source != target:
                arrows[source].setdefault(target, one)
        return [
            Circle(tuple(found), tuple(arrows[one][other] for one in found for other in found if other in arrows[one]))
            for found in circles(arrows)
        ]

    def crowded(self) -> list[str]:
        """Folders with too many files."""
        return [
            f"{room} has {count} files"
            for room, count in self.rooms().items()
            if count > MOST_FILES and room not in LARGE_ROOMS
        ]


def folder(module: str) -> str:
    """The folder that a module lies in; a package's __init__ lies in the package."""
    return module.rpartition("/")[0]


def room(module: str) -> str:
    """The folder that a module lies in, or the module itself where it lies in a floor."""
    return folder(module) if "/" in folder(module) else module


def read_house(root: Path = ROOT) -> House:
    """The house under `root`, from its sources. Raises SyntaxError for a file that is no Python."""
    paths = [path for top in FLOORS for path in sorted((root / top).rglob("*.py")) if "__pycache__" not in path.parts]
    modules = {path.relative_to(root).with_suffix("").as_posix(): path for path in paths}
    imports = [
        Import(module, target, line, kind)
        for module, path in modules.items()
        for target, line, kind in _imports(ast.parse(path.read_bytes()).body, module, modules, "early")
    ]
    return House(tuple(modules), tuple(dict.fromkeys(imports)))


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other, each in order of names."""
    reach = {node: _reached(graph, node) for node in graph}
    groups = {
        tuple(sorted({node} | {other for other in reach[node] if node in reach[other]}))
        for node in graph
        if node in reach[node]
    }
    return [list(group) for group in sorted(groups)]


def _reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += graph[node]
    return found


def _top(module: str) -> str:
    return module.partition("/")[0]


def _rises(source: str, target: str) -> bool:
    return source != target and FLOORS[target] >= FLOORS[source]


def _imports(
    body: Iterable[ast.AST], module: str, modules: Mapping[str, Path], kind: Kind
) -> Iterator[tuple[str, int, Kind]]:
    """(module, line, kind) of every import under these nodes."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for target in _targets(node, module, modules):
                yield target, node.lineno, kind
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from (
                    (target, node.lineno, kind)
                    for target in _module(alias.name.removeprefix("sidestream.").split("."), modules)
                    if alias.name.startswith("sidestream.")
                )
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _imports(ast.iter_child_nodes(node), module, modules, "late" if kind == "early" else kind)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.body, module, modules, "types")
            yield from _imports(node.orelse, module, modules, kind)
        else:
            yield from _imports(ast.iter_child_nodes(node), module, modules, kind)


def _targets(node: ast.ImportFrom, module: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a `from ... import ...` names: a module for each name that is one, else the package."""
    if node.level:
        base = module.split("/")[: -node.level]
    elif node.module is not None and node.module.partition(".")[0] == "sidestream":
        base = []
    else:
        return
    parts = base + [part for part in (node.module or "").split(".") if part and part != "sidestream"]
    for alias in node.names:
        yield from _module([*parts, alias.name], modules) or _module(parts, modules)


def _module(parts: list[str], modules: Mapping[str, Path]) -> list[str]:
    """The module of this path, or the package's own; none for what is not of the house."""
    path = "/".join(parts)
    return [found for found in (path, f"{path}/__init__") if found in modules][:1]


def main() -> int:
    """Entry point: prints the house; 1 when a rule is broken."""
    house = read_house()
    print("rooms (files):")
    for room, count in house.rooms().items():
        print(f"  {room:<24}{count:>4}")
    early, late, types = (house.arrows(kind) for kind in ("early", "late", "types"))
    print(f"\narrows ({sum(len(targets) for targets in early.values())}; + a function's imports, ? types alone):")
    for room in house.rooms():
        further = [f"+{target}" for target in sorted(set(late[room]) - set(early[room]))]
        further += [f"?{target}" for target in sorted(set(types[room]) - set(early[room]) - set(late[room]))]
        print(f"  {room} -> {', '.join([*sorted(early[room]), *further]) or 'none'}")
    broken = 0
    for title, lines in (
        ("upward imports", house.upward()),
        ("circles of modules", house.module_circles()),
        ("circles of rooms", house.room_circles()),
        ("crowded folders", house.crowded()),
    ):
        print(f"\n{title}: {len(lines) or 'none'}")
        for line in lines:
            print(f"  {line}")
        broken += len(lines)
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
