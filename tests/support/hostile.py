"""The corpus of odd frames in tests/corpus/frames, and frames made of it.

Each corpus file is the content of a frame after its header (the header names a running engine), or, if its name begins
with `raw_`, a whole frame.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from sidestream.tools.dev.chaos import frames as chaos

CORPUS = Path(__file__).parent.parent / "corpus" / "frames"


def corpus() -> dict[str, bytes]:
    """The files by name."""
    return {path.stem: path.read_bytes() for path in sorted(CORPUS.glob("*.bin"))}


def frames(seed: int, count: int, instance: bytes) -> Iterator[bytes]:
    """`count` hostile frames for an engine; the same ones for the same seed."""
    return chaos.frames(random.Random(seed), count, instance, corpus())
