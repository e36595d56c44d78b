"""Beam search: each step requests one token and its likeliest candidates for every continuation, and keeps the best.

The continuations share their prefixes in the prefix cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..api.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
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
    searches = [BeamSearch(request.prompt_ids, params, eos_ids) for request in requests]
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
