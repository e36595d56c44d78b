"""Speculation on the device, without a CPU in the loop: what each sequence's tokens are, where it stands, and what may
come next.

The device keeps `history` [R, H] int32 (row r: the tokens of the sequence that holds row r) and `lengths` [R] int32
(how many of them there are), because plans are made before the host knows how many drafts were accepted.

The device also keeps `rings` [G, W] int32: what adapters have answered last, a ring for each adapter's content.

draft_ngram     the tokens that followed the latest, longest earlier occurrence of a sequence's end
draft_recalled  the same from a ring, where that agrees with more of the end
place_drafts    a step's inputs for the sequences that only the device can place: tokens, positions, slots, lengths
accept_drafts   sampled tokens against drafts: how many hold; the history grows by them
keep_answers    answers that ended go into a ring
"""

from . import accept_drafts, draft_ngram, draft_recalled, keep_answers, place_drafts
