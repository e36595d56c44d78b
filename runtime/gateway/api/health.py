"""/health, /ready, /ping, /version, /metrics, /load, /console/history.

For trainers, as in vLLM: /pause, /resume, /is_paused, /get_world_size, /server_info.
"""

import functools
from typing import Literal, cast, get_args

import msgspec
from msgspec import field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .... import __version__
from ..interfaces import GatewayError, GatewayHealth, PauseMode
from .body_types import Answer
from .context import GatewayContext, admin_only, caller_of, json_response
from .request_body import while_connected

RETRY_AFTER = {"Retry-After": "1"}


class Status(Answer, frozen=True, kw_only=True):
    """Health of the engines. `progress` (0..1) and `phase` describe loading; `engines`: status of each engine."""

    status: Literal["loading", "ok", "stalled", "draining", "idle", "dead"]
    phase: str = ""
    progress: float = 0.0
    engines: dict[str, str] = field(default_factory=dict)


class Version(Answer, frozen=True, kw_only=True):
    """This package's release."""

    version: str


class Load(Answer, frozen=True, kw_only=True):
    """Number of requests that this gateway is answering, as in vLLM with --enable-server-load-tracking."""

    server_load: int


class PauseChanged(Answer, frozen=True, kw_only=True):
    """Confirms the change."""

    status: Literal["paused", "resumed"]


class Paused(Answer, frozen=True, kw_only=True):
    """Whether an engine is paused."""

    is_paused: bool


class WorldSize(Answer, frozen=True, kw_only=True):
    """Number of processes that compute the model."""

    world_size: int


class ModelConfig(Answer, frozen=True, kw_only=True):
    """The base model. `dtype`: of hidden states; `logprobs_mode`: raw_logprobs or processed_logprobs."""

    model: str
    dtype: str
    max_model_len: int
    logprobs_mode: str


class LoraConfig(Answer, frozen=True, kw_only=True):
    """The largest rank of an adapter that can be loaded, and the adapter slots on the device of an engine."""

    max_lora_rank: int
    max_loras: int


class ParallelConfig(Answer, frozen=True, kw_only=True):
    """Processes of an engine. `data_parallel_size` is 1 for several engines too: a loaded adapter is on all of them."""

    tensor_parallel_size: int
    data_parallel_size: Literal[1] = 1


class ServerConfig(Answer, frozen=True, kw_only=True):
    """Part of vLLM's config. `lora_config`: null without adapter slots; weights of the base model are not replaced."""

    model_config: ModelConfig
    lora_config: LoraConfig | None
    parallel_config: ParallelConfig
    weight_transfer_config: None = None


class ServerInfo(Answer, frozen=True, kw_only=True):
    """The configuration, with which TRL checks whether it can load adapters."""

    vllm_config: ServerConfig


async def health(context: GatewayContext, request: Request) -> Response:
    """Return 200 if an engine is alive (also while it loads or drains), else 503."""
    state = await context.engines.health()
    return _status_response(state, state.status != "dead")


async def ready(context: GatewayContext, request: Request) -> Response:
    """Return 200 if requests are accepted, 503 while the model loads and during shutdown."""
    state = await context.engines.health()
    return _status_response(state, state.status in ("ok", "stalled", "idle"))


async def ping(context: GatewayContext, request: Request) -> Response:
    """Return the status of /ready without a body, as SageMaker's probe expects."""
    response = await ready(context, request)
    return Response(status_code=response.status_code, headers=None if response.status_code == 200 else RETRY_AFTER)


async def version(request: Request) -> Response:
    """Return this package's release."""
    return json_response(Version(version=__version__))


async def metrics(context: GatewayContext, request: Request) -> Response:
    """Return metrics for Prometheus. Raises GatewayError 403 for a key without that permission."""
    _metrics_only(request)
    content_type, body = await context.observer.metrics(context.engines)
    return Response(body, headers={"Content-Type": content_type})


async def load(context: GatewayContext, request: Request) -> Response:
    """Return the number of open requests. Raises GatewayError 403 like /metrics."""
    _metrics_only(request)
    return json_response(Load(server_load=context.open_requests))


async def history(context: GatewayContext, request: Request) -> Response:
    """Return the samples of the last day after the time `after`, and the last failed requests.

    Raises GatewayError 403 like /metrics, 400 for an invalid time.
    """
    _metrics_only(request)
    given = request.query_params.get("after", "0")
    try:
        after = float(given)
    except ValueError:
        text = f"after is {given[:50]!r}; give a time in seconds since the epoch"
        raise GatewayError(400, text, param="after") from None
    return json_response(context.observer.history(after))


def _metrics_only(request: Request) -> None:
    if not caller_of(request).metrics:
        text = "this key may not read /metrics, which covers all owners"
        raise GatewayError(403, text, "permission_error", "metrics_only")


async def pause(context: GatewayContext, request: Request) -> Response:
    """Stop planning steps on all engines. `mode` says what happens to open requests. New ones wait."""
    admin_only(caller_of(request))
    mode, modes = request.query_params.get("mode", "abort"), get_args(PauseMode)
    if mode not in modes:
        raise GatewayError(400, f"mode={mode!r} must be one of {', '.join(modes)}", param="mode")
    await while_connected(request.receive, context.engines.pause(cast(PauseMode, mode)))
    return json_response(PauseChanged(status="paused"))


async def resume(context: GatewayContext, request: Request) -> Response:
    """Plan steps again after a pause."""
    admin_only(caller_of(request))
    await context.engines.resume()
    return json_response(PauseChanged(status="resumed"))


async def is_paused(context: GatewayContext, request: Request) -> Response:
    """Return whether an engine is paused."""
    admin_only(caller_of(request))
    stats = await context.engines.stats()
    return json_response(Paused(is_paused=any(values.get("paused") for values in stats.values())))


async def world_size(context: GatewayContext, request: Request) -> Response:
    """Return the number of processes of all engines, or with `include_dp=false` of one."""
    admin_only(caller_of(request))
    sizes = await _values_of_engines(context, "tensor_parallel_size", 1)
    one = request.query_params.get("include_dp", "true").lower() in ("false", "0")
    return json_response(WorldSize(world_size=sizes[0] if one else sum(sizes)))


async def server_info(context: GatewayContext, request: Request) -> Response:
    """Return the model's name and length, and the limits for adapters, as vLLM does with `config_format=json`."""
    admin_only(caller_of(request))
    model = await context.engines.model()
    rank = min(await _values_of_engines(context, "max_lora_rank", 0))
    config = ServerConfig(
        model_config=ModelConfig(
            model=model.name,
            dtype=model.dtype,
            max_model_len=model.max_model_len,
            logprobs_mode=model.logprobs_mode,
        ),
        lora_config=LoraConfig(max_lora_rank=rank, max_loras=model.max_adapters) if model.max_adapters else None,
        parallel_config=ParallelConfig(
            tensor_parallel_size=max(await _values_of_engines(context, "tensor_parallel_size", 1))
        ),
    )
    return json_response(ServerInfo(vllm_config=config))


async def _values_of_engines(context: GatewayContext, name: str, default: int) -> list[int]:
    """Return one of the engines' stats. Raises GatewayError 503 without an engine."""
    stats = await context.engines.stats()
    if not stats:
        raise GatewayError(503, "no engine answers at the moment", "server_error", "engine_dead", retry_after=1.0)
    return [int(values.get(name, default)) for values in stats.values()]


def _status_response(health: GatewayHealth, good: bool) -> Response:
    status = Status(status=health.status, phase=health.phase, progress=health.progress, engines=dict(health.engines))
    body = msgspec.json.encode(status)
    return Response(body, 200 if good else 503, None if good else RETRY_AFTER, "application/json")


def routes(context: GatewayContext) -> list[Route]:
    """Return the routes of the endpoints."""
    return [
        Route("/health", functools.partial(health, context), methods=["GET"]),
        Route("/ready", functools.partial(ready, context), methods=["GET"]),
        Route("/ping", functools.partial(ping, context), methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/console/history", functools.partial(history, context), methods=["GET"]),
        Route("/metrics", functools.partial(metrics, context), methods=["GET"]),
        Route("/load", functools.partial(load, context), methods=["GET"]),
        Route("/pause", functools.partial(pause, context), methods=["POST"]),
        Route("/resume", functools.partial(resume, context), methods=["POST"]),
        Route("/is_paused", functools.partial(is_paused, context), methods=["GET"]),
        Route("/get_world_size", functools.partial(world_size, context), methods=["GET"]),
        Route("/server_info", functools.partial(server_info, context), methods=["GET"]),
    ]
