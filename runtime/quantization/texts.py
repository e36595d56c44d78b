"""What a model reads while it is calibrated, where nobody names a text: prose and code in turn, of many modules of
Python's library.
"""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path

# `sidestream eval` measures with none of these
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
BLOCK = 2048  # characters, of a module's prose or code
CHARACTERS_A_TOKEN = 8  # more than any text has
ADAPTER_DOCUMENTS = 2


def standard_text() -> str:
    """Docstrings and code of the standard library, a block of each module's in turn; "" where its sources are not
    there.
    """
    found = (importlib.util.find_spec(name) for name in STANDARD_LIBRARY)
    paths = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
    sources = [path.read_text(encoding="utf-8") for path in paths if path.is_file() and path.suffix == ".py"]
    # the first half of a module is mostly its docstring
    parts = chain.from_iterable((_blocks(_prose(source)), _blocks(source[len(source) // 2 :])) for source in sources)
    return "\n\n".join(block for row in zip_longest(*parts, fillvalue="") for block in row if block)


def _prose(source: str) -> str:
    """The docstrings of a module, its classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text)


def _blocks(text: str) -> list[str]:
    return [text[first : first + BLOCK] for first in range(0, len(text), BLOCK)]


def documents(ids: Sequence[int], length: int, adapters: int) -> Iterator[tuple[list[int], int]]:
    """(token ids, adapter slot or -1): every piece of the text for the base, and two pieces for each adapter in
    turn.
    """
    pieces = [list(ids[first : first + length]) for first in range(0, len(ids), length)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    yield from ((piece, -1) for piece in pieces)
    for slot in range(adapters):
        for turn in range(min(ADAPTER_DOCUMENTS, len(pieces))):
            yield pieces[(slot * ADAPTER_DOCUMENTS + turn) % len(pieces)], slot
