"""Prints the places of the package at which msgspec would build a type's table outside of an import.

Run in a process of its own: tables that a test has built stay in its process.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import sidestream

PACKAGE = Path(sidestream.__file__).parent
PRODUCT = ("compiler", "graphs", "ops", "runtime", "tools")
LOCAL = {
    "runtime/gateway/intake/body_decoder.py: shape",  # of the event loop alone, and of the body worker's main thread
    "runtime/gateway/intake/body_errors.py: shape",  # a decoder has just refused it
    "runtime/processes/threads.py: each",  # `prepare_types` itself
    "tools/commands/run_batch.py: Line",  # a class of the function
}


def builds_table(shape: Any) -> bool:
    """Build the decoder of a type, and return whether msgspec read a class's annotations for it."""
    read = list[str]()
    sys.setprofile(lambda frame, event, _: read.append(frame.f_code.co_name) if event == "call" else None)
    try:
        msgspec.json.Decoder(shape)
    finally:
        sys.setprofile(None)
    return "get_class_annotations" in read or "get_dataclass_info" in read


def shapes_in(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the types that the calls of a file decode or convert to."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        keywords = {each.arg: each.value for each in node.keywords}
        match node.func.attr:
            case "decode" | "convert" if ast.unparse(node.func).startswith("msgspec."):
                shape = keywords.get("type") or (node.args[1] if len(node.args) > 1 else None)
            case "Decoder" if ast.unparse(node.func).startswith("msgspec."):
                shape = keywords.get("type") or (node.args[0] if node.args else None)
            case _:
                continue
        if shape is not None:
            yield shape


def unprepared(folder: Path) -> Iterator[str]:
    """Yield `FILE: TYPE` of each type that the import of its file leaves to be built."""
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(PACKAGE)
        found = list(shapes_in(ast.parse(file.read_text(encoding="utf-8"))))
        if not found:
            continue
        module = importlib.import_module(".".join(["sidestream", *name.with_suffix("").parts]))
        for shape in map(ast.unparse, found):
            if f"{name}: {shape}" not in LOCAL and builds_table(eval(shape, vars(module).copy())):
                yield f"{name}: {shape}"


if __name__ == "__main__":
    for part in PRODUCT:
        for place in unprepared(PACKAGE / part):
            print(place)
