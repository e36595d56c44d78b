"""/v1/completions: bodies, handler, events of a stream, and `echo`."""

import functools
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal, cast

from msgspec import UNSET, Meta, UnsetType, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.checks import MAX_TOKENS
from ...api.sampling_params import SamplingParams
from ...protocol.messages import MAX_PROMPT_TOKENS, Chunk, TokenLogprob
from ..interfaces import Engines, GatewayError, ModelInfo
from .beam_search import beam_search_params
from .body_types import MAX_PROMPTS, Answer, MetricsField, ReceiptField, Text, TokenId, TokenIds, Usage
from .completion_session import CompletionResult, estimated_tokens, open_session, reserved_tokens
from .context import GatewayContext, caller_of, json_response, new_id
from .event_stream import ChunkEncoder, EventStream, TextChunkEncoder
from .field_table import with_table_fields
from .logprobs import CompletionLogprobs, PromptLogprobs, TokenLogprobs, completion_logprobs, prompt_logprobs, text_of
from .sampling_fields import LogprobCount, TokenBody, sampling_params

DEFAULT_MAX_TOKENS = 16
Prompt = str | list[int]


@with_table_fields("completions")
class CompletionRequest(TokenBody, frozen=True, kw_only=True):
    """One or several prompts: texts, or lists of token ids. With `echo`, `max_tokens` 0 only scores the prompts."""

    prompt: Annotated[
        Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)],
        Meta(description="a text, a list of token ids, or a list of texts or of lists of token ids"),
    ]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: LogprobCount | bool | None = None
    add_special_tokens: Annotated[bool, Meta(description="for texts; default: true")] | None = None

    def prompts(self) -> list[Prompt]:
        """Return the prompts. Raises GatewayError 400 if their kinds differ, or if there are too many."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if set(map(type, given)) == {int}:
            return [cast(list[int], given)]
        if len(given) > MAX_PROMPTS:
            raise GatewayError(
                400, f"prompt has {len(given)} entries; at most {MAX_PROMPTS} are allowed", param="prompt"
            )
        prompts: list[Prompt] = [entry for entry in given if not isinstance(entry, int)]
        if len(prompts) < len(given) or len({type(entry) for entry in prompts}) > 1:
            raise GatewayError(400, "prompt mixes texts, token ids and lists of them; give one kind", param="prompt")
        return prompts

    def sampling(self, model: ModelInfo) -> SamplingParams:
        """Return the sampling parameters. Raises GatewayError 400 that names the field."""
        if self.scores_only and not self.echo:
            text = "max_tokens=0 generates nothing; give at least 1, or echo=true to score the prompt"
            raise GatewayError(400, text, param="max_tokens")
        default = min(DEFAULT_MAX_TOKENS, model.sampling_defaults.max_tokens or DEFAULT_MAX_TOKENS)
        max_tokens = 1 if self.scores_only else self.max_tokens or default  # an engine samples at least one token
        params = sampling_params(self, max_tokens, self.top_logprobs, model)
        if self.echo and self.top_logprobs is not None:
            counts = self.top_logprobs, self.prompt_logprobs or 0
            params = replace(params, prompt_logprobs=-1 if -1 in counts else max(counts))
        return params

    @property
    def logprobs_field(self) -> str:
        """The field that sets the number of likeliest tokens."""
        return "logprobs"

    @property
    def scores_only(self) -> bool:
        """Whether no token is generated."""
        return self.max_tokens == 0

    @property
    def top_logprobs(self) -> int | None:
        """The number of likeliest tokens in `logprobs`: 1 for true, as in vLLM; None: no `logprobs`."""
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)


class CompletionChoice(Answer, frozen=True, kw_only=True):
    """One completion, or new text of one. `stop_reason`: the stop string or stop token id that ended it, if any.

    `token_ids`, `prompt_token_ids`: with `return_token_ids`; in a stream new tokens, and those of the prompt in the
    completion's first event.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class Completion(Answer, frozen=True, kw_only=True):
    """The response, or one event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | None = None
    metrics: MetricsField = UNSET
    sidestream_receipt: ReceiptField = UNSET


@dataclass
class Echo:
    """A prompt that is repeated before its answers, with its log-probabilities if those of the answers are requested.

    first_token   text of its first token, which has no log-probability; None: no log-probabilities are requested
    num_scored    tokens after the first one, each with log-probabilities
    first_id      id of its first token
    """

    text: str
    first_token: str | None = None
    num_scored: int = 0
    first_id: int = 0
    _scores: list[list[TokenLogprob]] = field(default_factory=list)
    _held: list[Chunk] = field(default_factory=list)

    def add_scores(self, scores: Sequence[list[TokenLogprob]]) -> None:
        """Append log-probabilities of the prompt's next tokens."""
        self._scores += scores

    def release(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Add chunks of the answers, and return the chunks that can be sent.

        There are none until all tokens of the prompt have log-probabilities.
        """
        for chunk in chunks:
            self.add_scores(chunk.prompt_logprobs or ())
        self._held += chunks
        if len(self._scores) < self.num_scored:
            return []
        released, self._held = self._held, []
        return released

    def logprobs(
        self, logprobs: TokenLogprobs, offsets: Iterable[int], top: int, as_ids: bool = False
    ) -> CompletionLogprobs:
        """Return the log-probabilities of the prompt, followed by those of an answer."""
        prompt = self._aligned
        after = [len(self.text) + offset for offset in offsets]
        first = text_of(TokenLogprob(self.first_id, 0.0, 0), as_id=True) if as_ids else prompt.first_token
        return completion_logprobs([*prompt.logprobs, *logprobs], [*prompt.offsets, *after], top, first, as_ids)

    @cached_property
    def _aligned(self) -> "_AlignedPrompt":
        return _align(self.text, self.first_token or "", self._scores)


async def make_echo(engines: Engines, prompt: Prompt, ids: list[int] | None) -> Echo:
    """Return the echo of a prompt. Raises the engines' errors.

    ids   the prompt's tokens, for an echo with log-probabilities
    """
    text = prompt if isinstance(prompt, str) else await engines.detokenize(prompt)
    if ids is None:
        return Echo(text)
    return Echo(text, await engines.detokenize(ids[:1]), len(ids) - 1, ids[0] if ids else 0)


@dataclass(frozen=True)
class _AlignedPrompt:
    """A prompt's first token, the log-probabilities of the others, and the text offsets of all."""

    first_token: str
    logprobs: list[list[TokenLogprob]]
    offsets: list[int]


def _align(text: str, first: str, logprobs: list[list[TokenLogprob]]) -> _AlignedPrompt:
    """Find the offsets of the tokens in the text.

    The engine may add a first token (BOS), and SentencePiece may add a space before the first word.
    """
    whole = text.encode()
    token_bytes = [entry[0].token_bytes or b"" for entry in logprobs]
    others = b"".join(token_bytes)
    head = first.encode()
    if others[:1] == b" " and others[1:] == whole:
        start = next(index for index, token in enumerate(token_bytes) if token)
        stripped = [_without_space(token) for token in logprobs[start]]
        logprobs = [*logprobs[:start], stripped, *logprobs[start + 1 :]]
        token_bytes[start] = token_bytes[start][1:]
        head = b""
    elif whole.endswith(others) and (len(whole) == len(others) or whole == head + others or "\ufffd" in first):
        head = whole[: len(whole) - len(others)]
        first = text_of(TokenLogprob(0, 0.0, 0, head)) if head else first
    elif not whole.startswith(head):
        head = b""
    offsets, position, characters = [], 0, 0  # `characters`: number of characters that start before `position`
    for token in [head, *token_bytes]:
        inside = 0x80 <= (token or whole[position : position + 1] or b"a")[0] < 0xC0
        offsets.append(min(max(0, characters - inside), len(text)))
        position += len(token)
        characters += sum(not 0x80 <= byte < 0xC0 for byte in token)
    return _AlignedPrompt(first, logprobs, offsets)


def _without_space(token: TokenLogprob) -> TokenLogprob:
    return structs.replace(token, token_bytes=(token.token_bytes or b"").removeprefix(b" "))


async def completions(context: GatewayContext, request: Request) -> Response:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    return await answer_completion(context, request, await context.read_body(request, CompletionRequest))


async def answer_completion(context: GatewayContext, request: Request, given: CompletionRequest) -> Response:
    """Answer a counted request."""
    body = given.with_tokens_as_ids(context.settings.tokens_as_ids)
    target = await context.target(request, body.model, body.lora_path, body.lora_weights)
    params, prompts = body.sampling(target.model), body.prompts()
    beams, stream = beam_search_params(body, params, target.model), bool(body.stream)
    tokens, choices = sum(map(estimated_tokens, prompts)), body.num_choices * len(prompts)
    with reserved_tokens(context, request, target, tokens, params, choices) as ticket:
        ids: list[list[int]] = []
        special, scored = body.add_special_tokens is not False, bool(body.echo) and body.top_logprobs is not None
        for index, prompt in enumerate(prompts if body.needs_prompt_ids or scored else ()):
            whole = await context.prompt_ids(request, prompt, special)
            ids.append(body.truncated(whole, target.model.max_model_len, params.max_tokens))
            if len(ids[-1]) < len(whole):
                prompts[index] = ids[-1]
        echoes = []
        for index, prompt in enumerate(prompts if body.echo else ()):
            make = functools.partial(make_echo, context.engines, prompt, ids[index] if scored else None)
            echoes.append(await context.in_tokenizing_turn(request, make))
        session = open_session(
            context,
            request,
            ticket,
            target,
            ids or prompts,
            params,
            stream,
            body.priority,
            body.deadline_seconds,
            special,
        )
    session.constraint_field, session.scores_only, session.beams = body.constraint_field, body.scores_only, beams
    answer_id, created = new_id("cmpl"), int(time.time())
    if stream:
        encoder = ChunkEncoder(
            "text_completion", answer_id, created, target.name, body.stream_options, context.settings.force_usage
        )
        formatter = _CompletionFormatter(encoder, body, echoes, ids, params.n)
        return EventStream(session, encoder.with_usage(formatter, session.counts), receipts=True)
    results = await session.results(request.receive)
    for echo, result in zip(echoes, results[:: params.n], strict=False):
        echo.add_scores(result.prompt_logprobs)
    answer = Completion(
        id=answer_id,
        created=created,
        model=target.name,
        usage=session.counts.usage(),
        metrics=session.counts.metrics,
        sidestream_receipt=session.counts.receipt,
        choices=[
            _choice(
                body,
                index,
                result,
                results[index // params.n * params.n],
                echoes[index // params.n] if echoes else None,
                ids[index // params.n] if body.return_token_ids else None,
            )
            for index, result in enumerate(results)
        ],
    )
    return json_response(answer, session.headers)


def _choice(
    body: CompletionRequest,
    index: int,
    result: CompletionResult,
    first: CompletionResult,
    echo: Echo | None,
    prompt_ids: list[int] | None,
) -> CompletionChoice:
    """Return a choice of the response. `first`: the first result of its prompt, which has the prompt's scores."""
    logprobs = None
    if body.top_logprobs is not None:
        make_logprobs = completion_logprobs if echo is None else echo.logprobs
        as_ids = bool(body.return_tokens_as_token_ids)
        logprobs = make_logprobs(result.logprobs, result.text_offsets, body.shown(body.top_logprobs), as_ids=as_ids)
    scores = None
    if body.prompt_logprobs is not None:
        scores = prompt_logprobs(first.prompt_logprobs, body.prompt_logprobs)
    return CompletionChoice(
        index=index,
        text=result.text if echo is None else echo.text + result.text,
        logprobs=logprobs,
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
        prompt_logprobs=scores,
        prompt_token_ids=prompt_ids,
        token_ids=None if prompt_ids is None else result.token_ids,
    )


class _UnsentLogprobs:
    """Log-probabilities of tokens with unsent text: a stop string may still cut it off."""

    def __init__(self) -> None:
        self._logprobs: list[list[TokenLogprob]] = []
        self._offsets: list[int] = []
        self._sent_characters = 0

    def release(self, chunk: Chunk) -> tuple[list[list[TokenLogprob]], list[int]]:
        """Add a chunk. Returns the log-probabilities to send with its text, and their offsets."""
        self._logprobs += chunk.logprobs or []
        self._offsets += chunk.text_offsets or []
        self._sent_characters += len(chunk.text)
        ended = chunk.finish_reason is not None
        count = len(self._logprobs) if ended else bisect_left(self._offsets, self._sent_characters)
        offsets = [min(offset, self._sent_characters) for offset in self._offsets[:count]]
        logprobs = self._logprobs[:count]
        del self._logprobs[:count], self._offsets[:count]
        return logprobs, offsets


class _CompletionFormatter:
    """Formats the events of one request with `n` completions per prompt. `ids`: tokens of the prompts, if needed."""

    def __init__(
        self, encoder: ChunkEncoder, body: CompletionRequest, echoes: list[Echo], ids: list[list[int]], n: int
    ) -> None:
        self.format_end, self.format_error = encoder.format_end, encoder.format_error
        self._encoder, self._echoes, self._ids, self._n = encoder, echoes, ids, n
        top = body.top_logprobs
        self._top, self._as_ids = None if top is None else body.shown(top), bool(body.return_tokens_as_token_ids)
        self._returns_ids = bool(body.return_token_ids)
        self._begun: set[int] = set()  # completions whose first event has the prompt's tokens
        self._unsent: defaultdict[int, _UnsentLogprobs] = defaultdict(_UnsentLogprobs)
        self._pending_echoes = {prompt * n + index: echo for prompt, echo in enumerate(echoes) for index in range(n)}
        self._text_encoders: dict[int, TextChunkEncoder] = {}

    def format(self, prompt_index: int, chunks: Sequence[Chunk]) -> list[bytes]:
        if self._echoes:
            chunks = self._echoes[prompt_index].release(chunks)
        first = prompt_index * self._n
        return [event for chunk in chunks if (event := self._event(first + chunk.index, chunk)) is not None]

    def _event(self, index: int, chunk: Chunk) -> bytes | None:
        is_plain = self._top is None and not self._returns_ids and not self._pending_echoes
        if is_plain and chunk.text and chunk.finish_reason is None:
            text_encoder = self._text_encoders.get(index)
            if text_encoder is None:
                text_encoder = TextChunkEncoder(self._encoder, lambda text: CompletionChoice(index=index, text=text))
                self._text_encoders[index] = text_encoder
            return text_encoder.event(chunk.text)
        echo = self._pending_echoes.pop(index, None)
        text = chunk.text if echo is None else echo.text + chunk.text
        logprobs = None if self._top is None else self._logprobs(index, chunk, echo, self._top)
        has_tokens = self._returns_ids and bool(chunk.token_ids)
        if not text and logprobs is None and chunk.finish_reason is None and not has_tokens:
            return None
        prompt_ids: list[int] | UnsetType = UNSET
        if self._returns_ids and index not in self._begun:
            self._begun.add(index)
            prompt_ids = self._ids[index // self._n]
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=chunk.finish_reason,  # type: ignore[arg-type]  # never "abort": that is an error
            stop_reason=chunk.stop_reason,
            prompt_token_ids=prompt_ids,
            token_ids=chunk.token_ids if self._returns_ids else UNSET,
        )
        return self._encoder.event(choice)

    def _logprobs(self, index: int, chunk: Chunk, echo: Echo | None, top: int) -> CompletionLogprobs | None:
        """Return the log-probabilities to send with a chunk, after those of the prompt if `echo` is given."""
        logprobs, offsets = self._unsent[index].release(chunk)
        if echo is not None:
            return echo.logprobs(logprobs, offsets, top, self._as_ids)
        if not logprobs:
            return None
        before = len(self._echoes[index // self._n].text) if self._echoes else 0
        return completion_logprobs(logprobs, [before + offset for offset in offsets], top, as_ids=self._as_ids)


def routes(context: GatewayContext) -> list[Route]:
    """Return the route of the endpoint."""
    return [Route("/v1/completions", functools.partial(completions, context), methods=["POST"])]
