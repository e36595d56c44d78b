"""Whatever goes wrong, as OpenAI spells it: a status, a body, and when to try again."""

import logging
import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ...api.errors import RequestError, ServerError
from ..contracts import GatewayError
from ..shapes.errors import ErrorBody, ErrorDetail
from ..shapes.sampling import field_of

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
    "adapter_in_use": 409,
    "forbidden": 403,
    "deadline_exceeded": 504,
}
_HTTP_WORDS = {
    "replace=True": '"load_inplace": true',
    "list_adapters lists": "/v1/models lists",
}
"""How HTTP spells what the engine's messages name as Python does."""
_encoder = msgspec.json.Encoder()


def as_gateway_error(problem: BaseException) -> GatewayError:
    """What a caller is told of an exception. What is not known is logged, and told as a fault without details."""
    if isinstance(problem, GatewayError):
        return problem
    if isinstance(problem, RequestError):
        text = _in_http(str(problem))
        return GatewayError(400, text, param=field_of(text))
    if isinstance(problem, TimeoutError):
        return GatewayError(
            503, "the engine did not answer in time", "server_error", "engine_silent", None, RETRY_SECONDS
        )
    if isinstance(problem, ServerError):
        return _of_engine(problem)
    _log.error("a fault while a request was served", exc_info=problem)
    return GatewayError(500, "a fault in the gateway; others are not affected", "server_error", "internal_error")


def _of_engine(problem: ServerError) -> GatewayError:
    status = _STATUS.get(problem.code, 500)
    message = _in_http(str(problem))
    if problem.code in ("engine_dead", "wrong_instance", "hello_first"):
        # without its address, which is nobody's business
        message = "the engine is not there, or died while this request was open; try again"
    if status == 404:
        return GatewayError(404, message, code="model_not_found", param="model")
    if status in (429, 503):
        kind = "rate_limit_error" if status == 429 else "server_error"
        return GatewayError(status, message, kind, problem.code, None, problem.retry_after or RETRY_SECONDS)
    return GatewayError(status, message, "invalid_request_error" if status < 500 else "server_error", problem.code)


def _in_http(message: str) -> str:
    for python, http in _HTTP_WORDS.items():
        message = message.replace(python, http)
    return message


def error_body(error: GatewayError) -> bytes:
    """The body that tells an error."""
    detail = ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)
    return _encoder.encode(ErrorBody(error=detail))


def error_response(error: GatewayError) -> Response:
    """The answer that tells an error."""
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers.setdefault("WWW-Authenticate", "Bearer")
    return Response(error_body(error), error.status, headers, "application/json")


def answer_to(problem: Exception, method: str) -> Response:
    """The answer to a request of this method in which something went wrong."""
    if isinstance(problem, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if not isinstance(problem, HTTPException):
        return error_response(as_gateway_error(problem))
    # starlette's own: there is no such path, or it has no such method
    text = {404: "there is no such path; /docs lists all", 405: f"this path does not take {method}"}
    status = problem.status_code
    return error_response(
        GatewayError(status, text.get(status, "this is no request"), headers=dict(problem.headers or {}))
    )
