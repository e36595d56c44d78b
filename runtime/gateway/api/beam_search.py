"""Beam search of completions and chats: its parameters, and the chunks of the continuations that it finds."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from msgspec import structs

from ...api.beam_search import MAX_BEAM_WIDTH, BeamSearch, BeamSearchParams, BeamSearchSequence
from ...api.errors import DeadlineError, RequestError, ServerError
from ...api.request import Continuation
from ...api.sampling_params import SamplingParams
from ...protocol.messages import Chunk, TokenLogprob, Usage
from ..interfaces import EngineRequest, Engines, GatewayError, ModelInfo
from .sampling_fields import TokenBody

CONTEXT_TOKENS = 16
"""Last tokens of a prompt, with which an answer is decoded: some tokenizers drop a space at the start of a text."""
_WITHOUT_SEARCH = (
    "stream", "tools", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "prompt_logprobs", "logprob_token_ids", "receipt",
    "thinking_token_budget",
)  # fmt: skip
"""Fields that change the text or the scores of a sampled answer, or need one."""
_NEUTRAL = {"repetition_penalty": 1, "thinking_token_budget": -1}


def beam_search_params(body: TokenBody, params: SamplingParams, model: ModelInfo) -> BeamSearchParams | None:
    """Return the parameters of a body's beam search; None without `use_beam_search`. `params`: those of the body.

    A search is deterministic unless the body has a temperature. Raises GatewayError 400 that names the field.
    """
    if not body.use_beam_search:
        return None
    for name in _WITHOUT_SEARCH:
        value = getattr(body, name, None)
        if value not in (None, False, [], {}, _NEUTRAL.get(name)):
            raise GatewayError(400, f"{name} does not work with use_beam_search; leave one out", param=name)
    if params.structured_outputs is not None:
        name = body.constraint_field
        raise GatewayError(400, f"{name} does not work with use_beam_search; leave one out", param=name)
    if params.prompt_logprobs is not None or body.max_tokens == 0:
        text = "echo with logprobs or max_tokens=0 does not work with use_beam_search; leave one out"
        raise GatewayError(400, text, param="echo")
    width, field = body.num_choices, "n" if body.best_of is None else "best_of"
    if width > MAX_BEAM_WIDTH:
        text = f"{field}={width} is too large: a beam search has at most {MAX_BEAM_WIDTH} continuations"
        raise GatewayError(400, text, param=field)
    if width < params.n:
        raise GatewayError(400, f"best_of={width} must be at least n={params.n}", param=field)
    if 2 * width > model.max_logprobs:
        raise GatewayError(
            400,
            f"{field}={width} is too large: its search needs {2 * width} log-probabilities per position; this server "
            f"returns at most {model.max_logprobs}; start it with --max-logprobs {2 * width}",
            param=field,
        )
    try:
        return BeamSearchParams(
            beam_width=width,
            max_tokens=params.max_tokens or model.max_model_len,
            ignore_eos=params.ignore_eos,
            temperature=body.temperature or 0.0,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
    except RequestError as problem:
        raise GatewayError(400, str(problem), param="use_beam_search") from None


class _Candidates(dict[int, TokenLogprob]):
    """Candidates for the next token of a continuation, by id.

    reported   the likeliest tokens
    offset     characters of the text before the token
    """

    reported: Sequence[TokenLogprob] = ()
    offset: int = 0


async def search(
    engines: Engines,
    params: BeamSearchParams,
    model: ModelInfo,
    count: Callable[[int], None],
    request: EngineRequest,
) -> AsyncGenerator[list[Chunk], None]:
    """Yield one list with the whole `request.params.n` best continuations of a prompt of token ids, best first.

    Each step is one request to an engine, in which each continuation is a completion. `count` is called with the number
    of tokens of each. Closing the generator aborts the step. Raises the errors of `Engines.stream`.
    """
    ids = request.prompt if isinstance(request.prompt, list) else await engines.tokenize(request.prompt)
    room = min(params.max_tokens, request.params.max_tokens or params.max_tokens, model.max_model_len - len(ids))
    params, started = replace(params, max_tokens=max(1, room)), time.monotonic()
    state = BeamSearch([], params, frozenset(model.eos_token_ids))
    first_usage: Usage | None = None
    usage: Usage | None = None
    for step in range(params.max_tokens):
        if not state.beams:
            break
        left = request.deadline_seconds
        if left is not None and (left := left - (time.monotonic() - started)) <= 0:
            raise DeadlineError("the request's deadline passed; allow it more time", "deadline_exceeded")
        own = replace(
            _step_request(request, params, state.beams),
            request_id=f"{request.request_id}-{step}",
            when_accepted=None if step else request.when_accepted,
            deadline_seconds=left,
        )
        candidates = [_Candidates() for _ in state.beams]
        async with aclosing(engines.stream(own)) as lists:
            async for chunks in lists:
                for chunk in chunks:
                    usage = chunk.usage or usage
                    _add_candidates(candidates[chunk.index], chunk, 2 * params.beam_width)
        if not all(candidates):
            raise ServerError("a continuation could not be computed", "request_failed")
        count(len(candidates))
        first_usage = first_usage or usage
        state.extend(candidates)
    best = state.best()[: request.params.n]
    chunks = [
        await _chunk(engines, request, index, each, ids[-CONTEXT_TOKENS:], model) for index, each in enumerate(best)
    ]
    if first_usage is not None:
        whole = structs.replace(first_usage, total_seconds=time.monotonic() - started)
        chunks[-1] = structs.replace(chunks[-1], usage=whole)
    yield chunks


def _step_request(
    request: EngineRequest, params: BeamSearchParams, beams: Sequence[BeamSearchSequence]
) -> EngineRequest:
    """Return the request for the candidates of all beams."""
    asked, length = request.params.logprobs or 0, len(beams[0].tokens)
    sampling = replace(
        params.sampling,
        n=len(beams),
        max_tokens=length + 1,
        ignore_eos=True,
        logprobs=-1 if asked == -1 else max(2 * params.beam_width, asked),
        skip_special_tokens=request.params.skip_special_tokens,
    )
    offsets = [cast(_Candidates, each.logprobs[-1]).offset for each in beams if length]
    earlier = [Continuation(each.tokens, offset) for each, offset in zip(beams, offsets, strict=False)]
    return replace(request, params=sampling, continues=earlier, stream=True, direct=None)


def _add_candidates(candidates: _Candidates, chunk: Chunk, most: int) -> None:
    for entry, offset in zip(chunk.logprobs or (), chunk.text_offsets or (), strict=True):
        candidates.update({each.token_id: each for each in entry[: 1 + most]})
        candidates.reported, candidates.offset = entry[1:], offset


async def _chunk(
    engines: Engines,
    request: EngineRequest,
    index: int,
    found: BeamSearchSequence,
    context: list[int],
    model: ModelInfo,
) -> Chunk:
    """Return a continuation as one chunk. `context`: the prompt's last tokens."""
    skips, ids, text = request.params.skip_special_tokens, found.tokens, ""
    dropped = found.finish_reason == "stop" and not request.params.include_stop_str_in_output
    if model.has_tokenizer:
        before = await engines.detokenize(context, skips)
        text = (await engines.detokenize([*context, *(ids[:-1] if dropped else ids)], skips))[len(before) :]
    steps: list[Any] = found.logprobs
    reason: Any = found.finish_reason  # "stop" or "length"
    wants_logprobs = request.params.logprobs is not None
    return Chunk(
        request.request_id,
        index,
        0,
        text,
        ids,
        reason,
        found.stop_reason,
        [[step[token], *step.reported] for token, step in zip(ids, steps, strict=True)] if wants_logprobs else None,
        text_offsets=[min(step.offset, len(text)) for step in steps] if wants_logprobs else None,
    )
