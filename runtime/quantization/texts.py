"""Default calibration texts: prose and code from modules of Python's standard library."""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path

# not used by `sidestream eval`
STANDARD_LIBRARY = (
    "textwrap",
    "argparse",
    "doctest",
    "json.decoder",
    "difflib",
    "calendar",
    "tokenize",
    "fractions",
    "heapq",
    "csv",
    "random",
    "collections",
    "subprocess",
    "optparse",
    "configparser",
    "gettext",
    "traceback",
    "cmd",
    "timeit",
    "http.client",
)
BLOCK = 2048  # characters of prose or code
CHARACTERS_A_TOKEN = 8  # upper bound
ADAPTER_DOCUMENTS = 2


def standard_text() -> str:
    """Return docstrings and code of the modules, a block of each in turn; "" without source files."""
    found = (importlib.util.find_spec(name) for name in STANDARD_LIBRARY)
    paths = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
    sources = [path.read_text(encoding="utf-8") for path in paths if path.is_file() and path.suffix == ".py"]
    # the second half, because the first is mostly the docstring
    parts = chain.from_iterable((_blocks(_prose(source)), _blocks(source[len(source) // 2 :])) for source in sources)
    return "\n\n".join(block for row in zip_longest(*parts, fillvalue="") for block in row if block)


def _prose(source: str) -> str:
    """Return the docstrings of a module, its classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text)


def _blocks(text: str) -> list[str]:
    return [text[first : first + BLOCK] for first in range(0, len(text), BLOCK)]


def documents(ids: Sequence[int], length: int, adapters: int) -> Iterator[tuple[list[int], int]]:
    """Yield (token ids, adapter slot or -1): all pieces of the text for the base model, then two for each adapter."""
    pieces = [list(ids[first : first + length]) for first in range(0, len(ids), length)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    yield from ((piece, -1) for piece in pieces)
    for slot in range(adapters):
        for turn in range(min(ADAPTER_DOCUMENTS, len(pieces))):
            yield pieces[(slot * ADAPTER_DOCUMENTS + turn) % len(pieces)], slot
