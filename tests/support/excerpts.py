"""Excerpts of docs/internals.md: what the page shows, and under which torch it can be compared."""

import pytest
import torch
from sidestream.tools.dev.pages.excerpts import BLOCK
from sidestream.tools.dev.pages.internals import PAGE

MADE_WITH = (2, 13)  # other releases of torch capture other node names
same_torch = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) != MADE_WITH, reason="the excerpts are of another torch release"
)


def shown(name: str) -> str | None:
    """The excerpt's text on the page; None when the page does not show it."""
    blocks = {block["name"]: block["text"] for block in BLOCK.finditer(PAGE.read_text())}
    return blocks.get(name)
