"""Text of every Python installation: the language reference, Python's licence, the standard library's sources."""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from ....runtime.worker.calibrate.scorer import Document
from ..corpus import documents as library_documents

LENGTH, SHORTEST = 512, 256  # of a document, in tokens
PROSE_TO_CODE = 3  # documents of prose for one of code
MAX_CODE_DOCUMENTS = 64


def natural_documents(
    encode: Callable[[str], Sequence[int]], tokens: int, adapters: Sequence[str | None]
) -> list[Document]:
    """Return documents of at most LENGTH tokens, `tokens` or up to one document more for each of `adapters`.

    All adapters (None: the base model) read the same. Raises ValueError if this Python has too little text.
    """
    chosen: list[Sequence[int]] = []
    missing = tokens
    for text in _in_turn():
        ids = encode(text)[: min(LENGTH, max(missing, SHORTEST))]
        if len(ids) >= SHORTEST:
            chosen.append(ids)
            missing -= len(ids)
        if missing <= 0:
            return [Document(ids, adapter) for adapter in adapters for ids in chosen]
    raise ValueError(f"this Python has only {tokens - missing:,} tokens of text; ask for fewer than {tokens:,}")


def _in_turn() -> Iterator[str]:
    """Yield prose and code in turn, each document from another topic or file."""
    prose, code = _prose(), library_documents("held_out", MAX_CODE_DOCUMENTS)
    while True:
        some = [text for _, text in zip(range(PROSE_TO_CODE), prose, strict=False)]
        text = next(code, None)
        yield from some
        if text is not None:
            yield text
        if not some and text is None:
            return


def _prose() -> Iterator[str]:
    """Return the licence, then the topics of the language reference by name."""
    from pydoc_data.topics import topics

    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    first = [licence.read_text(encoding="utf-8")] if licence.is_file() else []
    return chain(first, (topics[name] for name in sorted(topics)))
