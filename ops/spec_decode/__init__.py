"""Speculative decoding on the device: drafts, their inputs, and their acceptance.

`history` [R, H] int32 (row r: the tokens of the sequence in row r) and `lengths` [R] int32 (their number) are on the
device, because plans are made before the host receives the number of accepted drafts. `rings` [G, W] int32 are ring
buffers of recent answers, one per adapter content.

draft_ngram         tokens that followed an earlier occurrence of a sequence's last tokens: the longest, then the latest
draft_from_answers  `draft_recalled`: tokens from a ring buffer, if it matches more of a sequence's last tokens
place_drafts        writes a step's tokens, positions, slots and lengths of sequences with drafts
accept_drafts       compares sampled tokens with drafts and appends the accepted ones to the history
store_answers       `keep_answers`: copies finished answers to a ring buffer
"""

from . import (
    accept_drafts,
    draft_ngram,
    place_drafts,
)
from . import (
    draft_from_answers as draft_recalled,
)
from . import (
    store_answers as keep_answers,
)
