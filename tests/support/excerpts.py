"""Excerpts of docs/internals.md: their text on the page, and the torch release that they were made with."""

import pytest
import torch
from sidestream.tools.dev.pages.tables import ROOT, blocks

MADE_WITH = (2, 13)  # other releases of torch capture other node names
same_torch = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) != MADE_WITH, reason="the excerpts are of another torch release"
)


def shown(name: str) -> str | None:
    """Return the excerpt's text on the page; None when the page does not show it."""
    return blocks((ROOT / "docs" / "internals.md").read_text()).get(name)
