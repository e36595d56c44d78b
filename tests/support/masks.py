"""What the masks of a constraint allow."""

from collections.abc import Sequence

import numpy as np
from sidestream.runtime.text.structured.mask_filling import FEW, consume_outputs, empty_masks, fill
from sidestream.runtime.text.structured.matcher import Matcher


def fill_masks(matchers: Sequence[Matcher]) -> np.ndarray:
    """The allowed next tokens of each completion: [M, W] words of 32 bits, lowest bit first."""
    masks = empty_masks(matchers, len(matchers))
    fill(masks, matchers, in_parallel=len(matchers) > FEW)
    return masks[:, : matchers[0].grammar.words]


def allowed_in(mask: np.ndarray) -> list[int]:
    """The tokens that a mask allows."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def num_allowed(matcher: Matcher, tokens: list[int]) -> int:
    """How many of the tokens the masks allow, one after another."""
    for place, token in enumerate(tokens):
        consume_outputs([matcher], [(tokens[:place], 0)], in_parallel=False)
        if matcher.failed or token not in allowed_in(fill_masks([matcher])[0]):
            return place
    return len(tokens)
