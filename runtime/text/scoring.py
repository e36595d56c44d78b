"""Scores: known tokens as requests to the engine, and the log-probabilities of the tokens that were sampled.

A request for a score has the tokens but the last one as its prompt, and may sample the last one only. So a score is
ordinary work: chunks of a prompt after a cached prefix, in steps with other requests.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..api.checks import check_integer
from ..api.errors import RequestError
from ..api.outputs import Logprob, RequestOutput, ScoreOutput
from ..api.sampling_params import RAW_LOGPROBS, SamplingParams
from .prompts import Prompt, as_list, check_vocabulary

Span = tuple[int, int]


class ScoreRequest(NamedTuple):
    """A request for the score of one sequence.

    prompt_ids   its tokens, without the last one
    scored       (begin, end) of the sampled tokens of the prompt, ascending
    params       sample the last token
    """

    prompt_ids: list[int]
    scored: tuple[Span, ...]
    params: SamplingParams


def score_request(
    segments: Iterable[tuple[bool, list[int]]], top: int, vocabulary: int, max_model_len: int, where: str = ""
) -> ScoreRequest:
    """Return the request for the log-probabilities of a sequence's sampled tokens.

    segments   whether its tokens were sampled, and the tokens; given tokens after the last sampled one are left out
    top        likeliest tokens to report at each position
    where      prefix of errors

    Raises RequestError if no token is sampled or the first one is, and for a sequence that the model cannot compute.
    """
    tokens: list[int] = []
    spans: list[Span] = []
    for is_sampled, ids in segments:
        if is_sampled and ids:
            begin = spans.pop()[0] if spans and spans[-1][1] == len(tokens) else len(tokens)
            spans.append((begin, len(tokens) + len(ids)))
        tokens += ids
    if not spans:
        raise RequestError(f"{where}no token is sampled; give at least one, after a given one")
    if spans[0][0] == 0:
        raise RequestError(f"{where}the first token is sampled, but nothing is before it; give it as a given token")
    begin, end = spans.pop()
    if end > max_model_len:
        raise RequestError(
            f"{where}the sequence has {end} tokens, more than max_model_len={max_model_len}; shorten it or raise "
            "max_model_len"
        )
    check_vocabulary(tokens, vocabulary, where)
    if begin < end - 1:
        spans.append((begin, end - 1))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=[tokens[end - 1]],
        logprobs=top,
        prompt_logprobs=top if spans else None,
        detokenize=False,
    )
    return ScoreRequest(tokens[: end - 1], tuple(spans), params)


def check_mode(logprobs_mode: str) -> None:
    """Raise RequestError unless log-probabilities are those of the model."""
    if logprobs_mode != RAW_LOGPROBS:
        raise RequestError(f"scores are of the raw logits, but this engine has {logprobs_mode}; start it without")


def prompts_and_responses(
    prompts: Any, responses: Any, top: Any, max_logprobs: int, logprobs_mode: str
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts and responses of a call as lists of the same length. Raises RequestError."""
    check_mode(logprobs_mode)
    check_integer("top", top, 0, max_logprobs, "the engine's max_logprobs")
    given, answers = as_list(prompts), as_list(responses, "responses")
    if len(given) != len(answers):
        raise RequestError(f"responses has {len(answers)} entries for {len(given)} prompts; give one per prompt")
    return given, answers


def pair_requests(
    prompts: Sequence[list[int]], responses: Sequence[list[int]], top: int, vocabulary: int, max_model_len: int
) -> list[ScoreRequest]:
    """Return the requests for the scores of responses to prompts. Raises RequestError naming the pair."""
    requests = []
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        where = f"pair {index}: " if len(prompts) > 1 else ""
        for noun, ids in (("prompt", prompt), ("response", response)):
            if not ids:
                raise RequestError(f"{where}the {noun} is empty; give at least one token")
        segments = (False, prompt), (True, response)
        requests.append(score_request(segments, top, vocabulary, max_model_len, where))
    return requests


def score_output(output: RequestOutput, top: int) -> ScoreOutput:
    """Return the score in the output of a `ScoreRequest`. Raises RequestError if the request failed."""
    import numpy as np  # clients start without it

    (completion,) = output.outputs
    if completion.finish_reason not in ("stop", "length"):
        raise RequestError(str(completion.stop_reason))
    entries = [entry for entry in output.prompt_logprobs or () if entry is not None] + (completion.logprobs or [])
    likeliest = [_likeliest(entry, top) for entry in entries]
    return ScoreOutput(
        logprobs=np.array([next(iter(entry.values())).logprob for entry in entries], np.float32),
        top_token_ids=np.array([[token for token, _ in row] for row in likeliest], np.int32),
        top_logprobs=np.array([[value.logprob for _, value in row] for row in likeliest], np.float32),
        num_cached_tokens=output.num_cached_tokens,
        adapter_active=output.adapter_active,
    )


def _likeliest(entry: dict[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: item[1].rank)[:top]
