"""Error responses in OpenAI's format, and on Anthropic's paths in Anthropic's, made from exceptions."""

import logging
import math
from typing import Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ...api.errors import RequestError, ServerError
from ..interfaces import GatewayError
from .body_types import Answer
from .sampling_fields import field_of

_log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0
CLIENT_GONE = 499
_STATUS = {
    "engine_dead": 503,
    "wrong_instance": 503,
    "hello_first": 503,
    "loading": 503,
    "draining": 503,
    "slow_reader": 503,
    "overloaded": 429,
    "too_many_requests": 429,
    "unknown_adapter": 404,
    "adapter_changed": 409,
    "adapter_error": 400,
    "adapter_not_found": 400,
    "adapter_in_use": 409,
    "version_conflict": 409,
    "forbidden": 403,
    "deadline_exceeded": 504,
    "aborted": 503,
}
_HTTP_WORDS = {
    "replace=True": '"load_inplace": true',
    "list_adapters lists": "/v1/models lists",
}
"""Python spelling in the engine's messages -> HTTP spelling."""
_EMBED = "this server only generates text; serve an embedding model with a server for these"
_SCORE = "no reranker is served; score a text with /v1/completions and echo=true, logprobs=1, max_tokens=0"
_HIDDEN = "hidden states are not returned; use /v1/completions, for a choice of labels with structured_outputs.choice"
_TEXT = "this server reads and writes text only; serve a model for these with another server"
_WEIGHTS = "a base model's weights cannot be replaced; train a LoRA adapter and load it with /v1/load_lora_adapter"
_GENERATE = (
    "use /v1/completions, with token ids as prompt and return_token_ids=true for tokens, or /v1/chat/completions for "
    "messages, as TRL's AsyncGRPO does"
)
_LOGPROBS = "score prompt and answer as one prompt of /v1/completions, with prompt_logprobs=0 and max_tokens=1"
_MEMORY = "the server keeps its GPU memory; /pause stops its work, and only its end frees the memory"
_CACHE = "cached prefixes belong to the content of an adapter, so that no reset is needed"
_INFO = "see /version, /v1/models, /health and /metrics"
UNSERVED = {
    f"/{path}": (status, remedy)
    for status, remedy, paths in (
        (404, _EMBED, "v1/embeddings embeddings embed"),
        (404, _SCORE, "score rerank v1/rerank v2/rerank"),
        (404, _HIDDEN, "pooling classify"),
        (404, _TEXT, "v1/audio/transcriptions v1/audio/translations v1/audio/speech v1/images/generations"),
        (404, _INFO, "get_server_info model_info get_model_info"),
        (404, "close the connection of a request to abort it", "abort_request abort_requests"),
        (501, _WEIGHTS, "init_communicator close_communicator update_named_param update_flattened_params"),
        (501, _WEIGHTS, "init_weight_transfer_engine start_weight_update update_weights finish_weight_update"),
        (501, _WEIGHTS, "init_weights_update_group update_weights_from_disk update_weights_from_distributed"),
        (501, _WEIGHTS, "update_weights_from_tensor destroy_weights_update_group fetch_weights collective_rpc"),
        (501, _GENERATE, "generate chat inference/v1/generate skyrl/v1/generate"),
        (501, _LOGPROBS, "get_sequence_logprobs"),
        (501, _MEMORY, "sleep wake_up is_sleeping release_memory_occupation resume_memory_occupation"),
        (501, _CACHE, "reset_prefix_cache flush_cache"),
        (501, "use /v1/load_lora_adapter", "skyrl/v1/load_lora_adapter"),
    )
    for path in paths.split()
}
"""Paths of other servers: status, and what to do instead."""
_encoder = msgspec.json.Encoder()


class ErrorDetail(Answer, frozen=True, kw_only=True):
    """One error. `message`: problem and remedy; `param`: the wrong field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Answer, frozen=True, kw_only=True):
    """The body of every response with a status of 400 or more, and of an event that ends a stream."""

    error: ErrorDetail


class AnthropicErrorDetail(Answer, frozen=True, kw_only=True):
    """One error. `message`: problem and remedy, with the wrong field."""

    type: str
    message: str


class AnthropicErrorBody(Answer, frozen=True, kw_only=True):
    """The same for /v1/messages."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


def model_not_found(message: str) -> GatewayError:
    """Return the error for a model or adapter that does not exist, or that the caller may not use."""
    return GatewayError(404, message, code="model_not_found", param="model")


def to_gateway_error(problem: BaseException) -> GatewayError:
    """Convert an exception. Unknown exceptions are logged and become a 500 without details."""
    if isinstance(problem, GatewayError):
        return problem
    if isinstance(problem, RequestError):
        text = _in_http_words(str(problem))
        if problem.code == "version_conflict":
            return GatewayError(409, text, code=problem.code, param="version")
        return GatewayError(400, text, param=field_of(text))
    if isinstance(problem, TimeoutError):
        return GatewayError(
            503, "the engine did not answer in time", "server_error", "engine_silent", None, RETRY_SECONDS
        )
    if isinstance(problem, ServerError):
        return _from_server_error(problem)
    _log.error("unexpected error in a request", exc_info=problem)
    return GatewayError(500, "internal error in the gateway", "server_error", "internal_error")


def _from_server_error(problem: ServerError) -> GatewayError:
    status = _STATUS.get(problem.code, 500)
    message = _in_http_words(str(problem))
    if problem.code in ("engine_dead", "wrong_instance", "hello_first"):
        # the original message holds the engine's address, which clients must not see
        message = "the engine is down, or died during this request; try again"
    if status == 404:
        return model_not_found(message)
    if status in (429, 503):
        kind = "rate_limit_error" if status == 429 else "server_error"
        return GatewayError(status, message, kind, problem.code, None, problem.retry_after or RETRY_SECONDS)
    return GatewayError(status, message, "invalid_request_error" if status < 500 else "server_error", problem.code)


def _in_http_words(message: str) -> str:
    for python, http in _HTTP_WORDS.items():
        message = message.replace(python, http)
    return message


def error_body(error: GatewayError) -> bytes:
    """Return the JSON body of an error."""
    detail = ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)
    return _encoder.encode(ErrorBody(error=detail))


_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_body(error: GatewayError) -> bytes:
    """Return the JSON body of an error in Anthropic's format."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    detail = AnthropicErrorDetail(type=_ANTHROPIC_TYPES.get(error.status, other), message=error.message)
    return _encoder.encode(AnthropicErrorBody(error=detail))


def _is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/")


def request_id_headers(path: str) -> tuple[bytes, ...]:
    """Return the names of the headers with the request id; Anthropic's clients read another one."""
    return (b"x-request-id", b"request-id") if _is_anthropic(path) else (b"x-request-id",)


def _error_response(error: GatewayError, path: str) -> Response:
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers.setdefault("WWW-Authenticate", "Bearer")
    body = anthropic_error_body(error) if _is_anthropic(path) else error_body(error)
    return Response(body, error.status, headers, "application/json")


def response_for(problem: Exception, method: str, path: str) -> Response:
    """Return the response to a request of HTTP method `method` that raised `problem`."""
    if isinstance(problem, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if not isinstance(problem, HTTPException):
        return _error_response(to_gateway_error(problem), path)
    # starlette's own errors: unknown path or method
    if problem.status_code == 404 and path.rstrip("/") in UNSERVED:
        status, remedy = UNSERVED[path.rstrip("/")]
        text = f"{path} does not exist here: {remedy}"
        return _error_response(GatewayError(status, text, code="unsupported_path"), path)
    texts = {404: "this path does not exist; /docs lists all", 405: f"this path does not support {method}"}
    status = problem.status_code
    return _error_response(
        GatewayError(status, texts.get(status, "invalid request"), headers=dict(problem.headers or {})), path
    )
