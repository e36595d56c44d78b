"""/v1/score: log-probabilities of tokens that were sampled before; bodies and handler."""

import base64
import functools
import time
from array import array
from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.sampling_params import MAX_LOGPROBS
from ...protocol.messages import MAX_SCORED_RANGES
from ...text.scoring import ScoreRequest, check_mode, score_request
from ..interfaces import ModelInfo
from .body_types import MAX_PROMPTS, Answer, Body, LoraWeights, ModelName, TokenIds, Usage
from .completion_session import CompletionResult, open_session, reserved_tokens
from .context import GatewayContext, caller_of, errors_as_400, json_response, new_id
from .sampling_fields import check_logprob_count


class Segment(Body, frozen=True, kw_only=True):
    """Consecutive tokens that were given to the model (a prompt, a tool's answer) or sampled by it."""

    kind: Literal["given", "sampled"]
    token_ids: TokenIds


class ScoredSequence(Body, frozen=True, kw_only=True):
    """A prompt and an answer, or several turns. The first token is a given one."""

    segments: Annotated[list[Segment], Meta(min_length=1, max_length=MAX_SCORED_RANGES)]


class ScoreBody(Body, frozen=True, kw_only=True):
    """Sequences whose sampled tokens are scored. `top_logprobs`: number of likeliest tokens at each position."""

    sequences: Annotated[list[ScoredSequence], Meta(min_length=1, max_length=MAX_PROMPTS)]
    model: ModelName | None = None
    lora_weights: LoraWeights | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    deadline_seconds: Annotated[float, Meta(gt=0, le=86400)] | None = None

    def requests(self, model: ModelInfo) -> list[ScoreRequest]:
        """Return the requests of the sequences. Raises GatewayError 400 that names the sequence."""
        requests = []
        with errors_as_400("sequences"):
            check_mode(model.logprobs_mode)
        check_logprob_count("top_logprobs", self.top_logprobs, model)
        for index, sequence in enumerate(self.sequences):
            where = f"sequences[{index}]"
            with errors_as_400(where):
                segments = ((each.kind == "sampled", each.token_ids) for each in sequence.segments)
                top, sizes = self.top_logprobs or 0, (model.vocabulary, model.max_model_len)
                requests.append(score_request(segments, top, *sizes, where=f"{where}: "))
        return requests


class SequenceScore(Answer, frozen=True, kw_only=True):
    """Scores of one sequence, as base64 of little-endian numbers.

    logprobs        [num_tokens] fp32: of the sampled tokens of all segments, under the raw logits
    top_token_ids   [num_tokens, top_logprobs] int32: the likeliest tokens at each position
    top_logprobs    [num_tokens, top_logprobs] fp32: their log-probabilities
    """

    index: int
    num_tokens: int
    logprobs: str
    top_token_ids: str | UnsetType = UNSET
    top_logprobs: str | UnsetType = UNSET


class Scores(Answer, frozen=True, kw_only=True):
    """The response. In `usage` the last sampled token of each sequence is a completion token, all others are prompt
    tokens.
    """

    id: str
    created: int
    model: str
    data: list[SequenceScore]
    usage: Usage
    object: Literal["list"] = "list"


async def score(context: GatewayContext, request: Request) -> Response:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    body = await context.read_body(request, ScoreBody)
    target = await context.target(request, body.model, None, body.lora_weights)
    scores = body.requests(target.model)
    prompts, params = [each.prompt_ids for each in scores], scores[0].params
    with reserved_tokens(context, request, target, sum(map(len, prompts)), params, len(scores)) as ticket:
        session = open_session(
            context,
            request,
            ticket,
            target,
            prompts,
            params,
            False,
            body.priority,
            body.deadline_seconds,
            scores=scores,
        )
    results = await session.results(request.receive)
    answer = Scores(
        id=new_id("score"),
        created=int(time.time()),
        model=target.name,
        data=[_sequence_score(index, result, body.top_logprobs or 0) for index, result in enumerate(results)],
        usage=session.counts.usage(),
    )
    return json_response(answer, session.headers)


def _sequence_score(index: int, result: CompletionResult, top: int) -> SequenceScore:
    entries = [*result.prompt_logprobs, *result.logprobs]
    likeliest = [token for entry in entries for token in sorted(entry, key=lambda token: token.rank)[:top]]
    return SequenceScore(
        index=index,
        num_tokens=len(entries),
        logprobs=_base64("f", (entry[0].logprob for entry in entries)),
        top_token_ids=_base64("i", (token.token_id for token in likeliest)) if top else UNSET,
        top_logprobs=_base64("f", (token.logprob for token in likeliest)) if top else UNSET,
    )


def _base64(kind: str, values: Iterable[float]) -> str:
    return base64.b64encode(array(kind, values).tobytes()).decode()


def routes(context: GatewayContext) -> list[Route]:
    """Return the route of the endpoint."""
    return [Route("/v1/score", functools.partial(score, context), methods=["POST"])]
