"""Beam search: each step requests one token and its likeliest candidates for every continuation, and keeps the best.

The continuations share their prefixes in the prefix cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import nlargest

from ..api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from ..api.errors import RequestError
from ..api.outputs import Logprob, RequestOutput
from ..api.request import Request
from ..api.sampling_params import SamplingParams
from ..text.tokenizer import Tokenizer

Generate = Callable[[list[list[int]], SamplingParams, list[Request]], list[RequestOutput]]
Candidates = dict[int, Logprob]


def beam_search(
    requests: Sequence[Request],
    params: BeamSearchParams,
    eos_ids: frozenset[int],
    tokenizer: Tokenizer | None,
    generate: Generate,
) -> list[BeamSearchOutput]:
    """Return the `beam_width` best continuations of each request's prompt, best first.

    `generate(prompts, sampling, origins)` completes prompts, each for its request of `requests`. Raises
    RequestError if it fails.
    """
    sampling = replace(params.sampling, max_tokens=1, ignore_eos=True)
    searches = [_Search(request.prompt_ids, params, eos_ids) for request in requests]
    for _ in range(params.max_tokens):
        prompts = [beam.tokens for search in searches for beam in search.beams]
        if not prompts:
            break
        origins = [request for request, search in zip(requests, searches, strict=True) for _ in search.beams]
        found = iter([_candidates(output) for output in generate(prompts, sampling, origins)])
        for search in searches:
            search.extend([next(found) for _ in search.beams])
    outputs = [BeamSearchOutput(search.best()) for search in searches]
    if tokenizer is not None:
        for sequence in (sequence for output in outputs for sequence in output.sequences):
            sequence.text = tokenizer.decode(sequence.tokens, not params.include_stop_str_in_output)
    return outputs


def _candidates(output: RequestOutput) -> Candidates:
    completion = output.outputs[0]
    if not completion.logprobs:
        raise RequestError(
            f"a continuation could not be computed: {completion.stop_reason or completion.finish_reason}"
        )
    return completion.logprobs[0]


class _Search:
    """Search of one prompt. `beams`: open continuations; none once they cannot beat the complete ones."""

    def __init__(self, prompt: list[int], params: BeamSearchParams, eos_ids: frozenset[int]) -> None:
        self.beams = [BeamSearchSequence(list(prompt))]
        self._complete: list[BeamSearchSequence] = []
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._longest = len(prompt) + params.max_tokens

    def extend(self, candidates: Sequence[Candidates]) -> None:
        """Extend each beam by one of its candidates."""
        if not self.beams:
            return
        width = self._params.beam_width
        extensions = [
            (beam.cum_logprob + entry.logprob, token, beam, entries)
            for beam, entries in zip(self.beams, candidates, strict=True)
            for token, entry in entries.items()
        ]
        unfinished = [each for each in extensions if each[1] not in self._eos_ids]
        self.beams = [_extended(*each) for each in nlargest(width, unfinished, key=lambda each: each[0])]
        for each in extensions:
            if each[1] in self._eos_ids:
                ended = _extended(*each)
                ended.finish_reason, ended.stop_reason = "stop", ended.tokens[-1]
                self._complete.append(ended)
        self._complete = nlargest(width, self._complete, key=self._score)
        bound = max(map(self._score_bound, self.beams), default=0.0)
        if len(self._complete) == width and self._score(self._complete[-1]) >= bound:
            self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """Return the best continuations, best first."""
        for beam in self.beams:
            beam.finish_reason = "length"
        return nlargest(self._params.beam_width, self._complete + self.beams, key=self._score)

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return float(sequence.cum_logprob / length**self._params.length_penalty)

    def _score_bound(self, beam: BeamSearchSequence) -> float:
        """Return an upper bound of the scores of a beam's continuations.

        They are at most as likely as the beam. With a penalty above 0 the longest one has the highest score.
        """
        penalty = self._params.length_penalty
        return float(beam.cum_logprob / (self._longest if penalty > 0 else len(beam.tokens)) ** penalty)


def _extended(total: float, token: int, beam: BeamSearchSequence, entries: Candidates) -> BeamSearchSequence:
    return BeamSearchSequence([*beam.tokens, token], total, logprobs=[*beam.logprobs, entries])
