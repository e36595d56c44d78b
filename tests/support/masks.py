"""What the masks of a constraint allow."""

import numpy as np
from sidestream.runtime.text.structured.mask_filling import consume_outputs, fill_masks
from sidestream.runtime.text.structured.matcher import Matcher


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
