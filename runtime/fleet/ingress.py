"""A replica of the deployment `ingress`: the gateway's application in front of the fleet's engines."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from ..gateway.app import build_app, make_components
from ..gateway.router.adapter_root import AdapterRoot
from ..gateway.router.router import Router
from ..gateway.settings import GatewaySettings
from .loopback_only import LoopbackOnly
from .status import overview

_log = logging.getLogger("ray.serve")
POLL_SECONDS = 1.0
SCAN_SECONDS = 5.0
_lock = threading.Lock()
_replicas: Mapping[str, str] = {}
_listener: Callable[[Mapping[str, str]], None] | None = None
"""The replicas that accept requests, name -> address, are global state: Ray creates their publisher, the request
router, in its own thread without arguments."""


def publish(replicas: Mapping[str, str]) -> None:
    """Replace the list of replicas. Called by `EngineRouter`."""
    global _replicas
    with _lock:
        if replicas == _replicas:
            return
        _replicas = replicas
        if _listener is not None:
            _listener(replicas)


def subscribe(listener: Callable[[Mapping[str, str]], None]) -> None:
    """Call `listener` with the list now and after each change, in the publisher's thread."""
    global _listener
    with _lock:
        _listener = listener
        listener(_replicas)


class Ingress:
    """The actor of Ray Serve. The gateway's router routes requests and handles dead engines.

    Ray reports the engines, and starts a first one when a request waits.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it: it needs the loop
        self, settings: GatewaySettings, patience_seconds: float, adapters_root: str | None, engines: DeploymentHandle
    ) -> None:
        self._engines, self._application = engines, serve.get_replica_context().app_name
        self._loop = asyncio.get_running_loop()
        self._wake_task: asyncio.Task[None] | None = None
        self._names: dict[str, str] = {}
        self._root = None if adapters_root is None else AdapterRoot(adapters_root)
        self._router = Router(
            [],
            settings.engine_keys,
            patience_seconds=patience_seconds,
            request_engine=self._request_engine,
        )
        self._components = make_components(settings, self._router)
        if settings.keys is None and not settings.insecure:
            self._components = replace(self._components, admission=LoopbackOnly())
        self._settings = settings
        subscribe(self._on_replicas)
        self._tasks = [asyncio.create_task(self._connect_to_controller())]
        if self._root is not None:
            await self._scan_root(self._root)
            self._tasks.append(asyncio.create_task(self._scan_root_periodically(self._root)))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_app(
            self._components.engines, self._components.admission, self._components.observer, self._settings
        )

    async def overview(self) -> dict[str, Any]:
        return await overview(self._router)

    async def __del__(self) -> None:
        for task in self._tasks if self._wake_task is None else [*self._tasks, self._wake_task]:
            task.cancel()
        self._components.close()

    def _on_replicas(self, replicas: Mapping[str, str]) -> None:
        self._loop.call_soon_threadsafe(self._update_router, replicas)

    def _update_router(self, replicas: Mapping[str, str]) -> None:
        """Follow Ray's replicas. One that has another address is another engine."""
        for name, _ in self._names.items() - replicas.items():
            self._router.remove(name)
        for name, address in replicas.items() - self._names.items():
            self._router.add(name, address)
        self._names = dict(replicas)

    def _request_engine(self) -> None:
        if self._wake_task is None or self._wake_task.done():
            self._wake_task = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        """Call a replica. If there is none, Ray starts one for the call."""
        try:
            await self._engines.wake.remote()
        except Exception as problem:  # of Ray; the waiting request tries again
            _log.warning("Ray could not start an engine: %r", problem)
            await asyncio.sleep(POLL_SECONDS)

    async def _scan_root_periodically(self, root: AdapterRoot) -> None:
        while True:
            await asyncio.sleep(SCAN_SECONDS)
            await self._scan_root(root)

    async def _scan_root(self, root: AdapterRoot) -> None:
        try:
            self._router.set_offered(await asyncio.to_thread(root.scan))
        except OSError as problem:  # keep the adapters of the last scan
            _log.warning("cannot read the adapters' root: %s", problem)

    async def _connect_to_controller(self) -> None:
        """Make a first call as soon as there is an engine. It connects the handle to Ray's controller.

        Without an engine, the call would start one.
        """
        while not self._names:
            with contextlib.suppress(Exception):  # the controller is restarting; try again
                if await asyncio.to_thread(has_running_engine, self._application):
                    self._request_engine()
            await asyncio.sleep(POLL_SECONDS)


def has_running_engine(application: str) -> bool:
    """Return whether an engine of this fleet is running."""
    status = serve.status().applications.get(application)
    return status is not None and status.deployments["engine"].replica_states.get("RUNNING", 0) > 0
