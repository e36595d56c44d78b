"""/generative_scoring: the probability of a label as the next token after a query and each of several items."""

import functools
import math
import time
from typing import Annotated, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....api.checks import MAX_ALLOWED
from ....api.sampling_params import SamplingParams
from ....text.scoring import check_mode
from ...interfaces import GatewayError
from ..body_types import MAX_PROMPTS, Answer, Body, LoraWeights, ModelName, Text, TokenId, TokenIds, Usage
from ..completion_session import CompletionResult, open_session, reserved_tokens
from ..context import GatewayContext, caller_of, errors_as_400, json_response, new_id
from ..sampling_fields import check_logprob_count


class GenerativeScoringBody(Body, frozen=True, kw_only=True):
    """A query and items. `apply_softmax` false: probabilities among all tokens, not only among the labels."""

    query: Text | TokenIds
    items: Annotated[list[Text | TokenIds], Meta(min_length=1, max_length=MAX_PROMPTS)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)]
    model: ModelName | None = None
    lora_weights: LoraWeights | None = None
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None

    def score(self, result: CompletionResult) -> float:
        """Return the probability of the first label."""
        probabilities = {token.token_id: math.exp(token.logprob) for token in result.logprobs[0]}
        total = sum(probabilities[label] for label in set(self.label_token_ids)) if self.apply_softmax else 1.0
        return probabilities[self.label_token_ids[0]] / total if total else 0.0


class ItemScore(Answer, frozen=True, kw_only=True):
    """The probability of the first label after an item."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ItemScores(Answer, frozen=True, kw_only=True):
    """The response."""

    id: str
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage
    object: Literal["list"] = "list"


async def generative_scoring(context: GatewayContext, request: Request) -> Response:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    body = await context.read_body(request, GenerativeScoringBody)
    target = await context.target(request, body.model, None, body.lora_weights)
    with errors_as_400("label_token_ids"):
        check_mode(target.model.logprobs_mode)
    check_logprob_count("label_token_ids", len(set(body.label_token_ids)), target.model)
    if max(body.label_token_ids) >= target.model.vocabulary:
        text = f"label_token_ids has {max(body.label_token_ids)}, but the model has {target.model.vocabulary} tokens"
        raise GatewayError(400, text, param="label_token_ids")
    query = await context.prompt_ids(request, body.query, body.add_special_tokens)
    items = [await context.prompt_ids(request, item, False) for item in body.items]
    prompts = [item + query if body.item_first else query + item for item in items]
    labels = body.label_token_ids
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=labels, allowed_token_ids=labels[:1])
    with reserved_tokens(context, request, target, sum(map(len, prompts)), params, len(prompts)) as ticket:
        session = open_session(context, request, ticket, target, prompts, params, False, body.priority)
    results = await session.results(request.receive)
    answer = ItemScores(
        id=new_id("generative-scoring"),
        created=int(time.time()),
        model=target.name,
        data=[ItemScore(index=index, score=body.score(result)) for index, result in enumerate(results)],
        usage=session.counts.usage(),
    )
    return json_response(answer, session.headers)


def routes(context: GatewayContext) -> list[Route]:
    """Return the route of the endpoint."""
    return [Route("/generative_scoring", functools.partial(generative_scoring, context), methods=["POST"])]
