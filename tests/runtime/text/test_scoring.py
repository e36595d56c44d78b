"""Requests for scores: which tokens are the prompt, which ones are scored, and which one is sampled."""

import pytest
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.text.scoring import score_request


@pytest.mark.parametrize(
    ("segments", "prompt", "scored", "last"),
    [
        ([(False, [1, 2]), (True, [3])], [1, 2], (), 3),
        ([(False, [1]), (True, [2, 3, 4])], [1, 2, 3], ((1, 3),), 4),
        ([(False, [1]), (True, [2, 3]), (True, [4])], [1, 2, 3], ((1, 3),), 4),  # one answer in two segments
        ([(False, [1]), (True, [2]), (False, []), (True, [3])], [1, 2], ((1, 2),), 3),
        ([(False, [1]), (True, [2, 3]), (False, [4]), (True, [5])], [1, 2, 3, 4], ((1, 3),), 5),
        ([(False, [1]), (True, [2]), (False, [3]), (True, [4, 5])], [1, 2, 3, 4], ((1, 2), (3, 4)), 5),
        ([(False, [1]), (True, [2, 3]), (False, [4, 5])], [1, 2], ((1, 2),), 3),  # nothing sampled follows
        ([(False, [1]), (True, [2]), (True, []), (False, [9])], [1], (), 2),
    ],
)
def test_the_last_sampled_token_is_sampled_and_the_others_are_scored(segments, prompt, scored, last):
    request = score_request(segments, 2, 10, 5)
    assert (request.prompt_ids, request.scored, request.params.allowed_ids) == (prompt, scored, (last,))
    assert request.params.logprobs == 2 and request.params.prompt_logprobs == (2 if scored else None)
    assert request.params.max_tokens == 1 and request.params.temperature == 0.0


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([], "x: no token is sampled"),
        ([(False, [1]), (True, [])], "x: no token is sampled"),
        ([(True, [1, 2])], "x: the first token is sampled"),
        ([(False, []), (True, [1, 2])], "x: the first token is sampled"),
        ([(False, [1]), (True, [2] * 5)], "x: the sequence has 6 tokens, more than max_model_len=5"),
        ([(False, [1]), (True, [10])], "x: token id 10 is out of vocabulary: the model has 10 tokens"),
        ([(False, [1]), (True, [2]), (False, [10])], "x: token id 10 is out of vocabulary"),
    ],
)
def test_what_cannot_be_scored_is_refused(segments, words):
    with pytest.raises(RequestError) as caught:
        score_request(segments, 0, 10, 5, "x: ")
    assert words in str(caught.value)
