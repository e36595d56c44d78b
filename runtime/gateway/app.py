"""Builds the ASGI application, and its components as the settings ask for them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.routing import Router as RouteTable

from .api import completions, health, models, pages, score
from .api.anthropic import messages
from .api.chat import endpoint as chat
from .api.context import GatewayContext
from .api.responses import endpoint as responses
from .api.vllm import batch, generative_scoring, invocations, render, tokenize
from .auth.admission import KeyAdmission, NoAuth
from .auth.key_store import KeyStore
from .auth.usage_log import PayloadLog, UsageLog
from .interfaces import Admission, Engines, Observer
from .metrics.access_log import AccessLog
from .metrics.history import INTERVAL_SECONDS
from .metrics.metrics import Metrics
from .metrics.observers import BaseObserver, CompositeObserver
from .metrics.tracing import Tracing, exporting_to
from .middleware import GatewayMiddleware
from .origin_policy import OriginPolicy
from .router.adapter_folder import AdapterFolder
from .router.router import Router
from .settings import GatewaySettings

_CHATS = (chat, batch, render, completions, invocations, responses, messages)
_ENDPOINTS = (*_CHATS, score, generative_scoring, models, tokenize, health, pages)


def build_app(
    engines: Engines, admission: Admission, observer: Observer, settings: GatewaySettings
) -> GatewayMiddleware:
    """Return the gateway as an ASGI application. Its lifespan connects to the engines and disconnects."""
    context = GatewayContext(engines, admission, observer, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[None, None]:
        await engines.start()
        tasks = [asyncio.create_task(_sample(observer, engines))]
        if settings.adapters_folder is not None:
            folder = AdapterFolder(settings.adapters_folder, settings.adapter_versions, engines)
            tasks.append(asyncio.create_task(folder.run()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await engines.close()
            context.close()

    table = RouteTable([route for endpoint in _ENDPOINTS for route in endpoint.routes(context)], lifespan=lifespan)
    return GatewayMiddleware(table, admission, observer, OriginPolicy(settings), settings.root_path)


async def _sample(observer: Observer, engines: Engines) -> None:
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        await observer.add_sample(engines)


@dataclass(frozen=True)
class GatewayComponents:
    """Arguments of `build_app`. `close` ends the threads of the logs."""

    engines: Engines
    admission: Admission
    observer: Observer
    close: Callable[[], None]


def make_components(settings: GatewaySettings, engines: Engines | None = None) -> GatewayComponents:
    """Build the components. `engines` replaces a router to the engines of the settings.

    Raises ValueError for a file or an address that cannot be used.
    """
    engines = engines or Router(
        settings.engines,
        settings.engine_keys,
        prefill_engines=settings.prefill_engines,
        prefill_min_tokens=settings.prefill_min_tokens,
    )
    key_store = None if settings.keys is None else KeyStore(Path(settings.keys))
    usage_log = None if settings.usage_log is None else UsageLog(Path(settings.usage_log), days=settings.usage_days)
    closing: list[Callable[[], None]] = []
    observers: list[BaseObserver] = []
    access_log = None
    if settings.access_log is not None:
        access_log = AccessLog(None if settings.access_log == "-" else Path(settings.access_log))
        closing.append(access_log.close)
        observers.append(access_log)
    if usage_log is not None:
        closing.append(usage_log.close)
        observers += [usage_log, PayloadLog(usage_log)] if settings.log_payloads else [usage_log]
    if settings.otel_endpoint is not None:
        tracing = Tracing(exporting_to(settings.otel_endpoint))
        closing.append(tracing.close)
        observers.append(tracing)
    metrics = Metrics(
        vllm=settings.metrics_compat == "vllm",
        component_values=lambda: component_values(key_store, usage_log, access_log),
    )

    def close() -> None:
        for end in closing:
            end()

    admission: Admission = (
        NoAuth(settings.api_key, settings.admin_key) if key_store is None else KeyAdmission(key_store, usage_log)
    )
    return GatewayComponents(engines, admission, CompositeObserver(metrics, observers), close)


def component_values(
    key_store: KeyStore | None, usage_log: UsageLog | None, access_log: AccessLog | None
) -> dict[str, int | float]:
    """Return the values that /metrics exports for the key store and the logs, by metric name."""
    values: dict[str, int | float] = {}
    if key_store is not None:
        values |= {
            "keys": len(key_store.keys),
            "keys_file_broken": bool(key_store.problem),
            "keys_file_failures_total": key_store.failures,
        }
    if usage_log is not None:
        values |= {
            "usage_log_written_total": usage_log.written,
            "usage_log_dropped_total": usage_log.dropped,
            "usage_log_set_aside_total": usage_log.set_aside,
            "usage_log_queued": usage_log.queued,
            "usage_log_failing": bool(usage_log.problem),
        }
    if access_log is not None:
        values["access_log_dropped_total"] = access_log.dropped
    return values
