"""A replica of the deployment `ingress`: the gateway's application before the engines of the fleet."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from ..api.errors import EngineDeadError, ServerError
from ..gateway.router.catalogue import Offer
from ..gateway.router.router import Router
from ..gateway.serving.app import build_app
from ..gateway.serving.parts import make_parts
from ..gateway.settings import GatewaySettings
from .adapter_root import AdapterRoot
from .members import listen
from .status import overview
from .this_machine import ThisMachine

_log = logging.getLogger("ray.serve")
LOOK_SECONDS = 1.0
ROOT_SECONDS = 5.0


class Ingress:
    """What Ray Serve starts and stops. Which engine gets a request, and what happens when one dies, is the gateway's
    router's business; Ray says which engines there are, and is told when a request waits for the first.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it: it needs the loop
        self, settings: GatewaySettings, patience_seconds: float, adapters_root: str | None, engines: DeploymentHandle
    ) -> None:
        self._engines, self._application = engines, serve.get_replica_context().app_name
        self._loop = asyncio.get_running_loop()
        self._waking: asyncio.Task[None] | None = None
        self._names: set[str] = set()
        self._root = None if adapters_root is None else AdapterRoot(adapters_root)
        self._router = Router(
            [],
            settings.engine_keys,
            patience_seconds=patience_seconds,
            summon=self._summon,
            fetch=self._fetch if self._root is not None and self._root.remote else None,
        )
        self._parts = make_parts(settings, self._router)
        if settings.keys is None and not settings.insecure:
            self._parts = replace(self._parts, admission=ThisMachine())
        self._settings = settings
        listen(self._told)
        self._tasks = [asyncio.create_task(self._meet())]
        if self._root is not None:
            await self._look_at(self._root)
            self._tasks.append(asyncio.create_task(self._follow_root(self._root)))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_app(self._parts.engines, self._parts.admission, self._parts.observer, self._settings)

    async def overview(self) -> dict[str, Any]:
        """See `status.overview`."""
        return await overview(self._router)

    async def __del__(self) -> None:
        for task in self._tasks if self._waking is None else [*self._tasks, self._waking]:
            task.cancel()
        self._parts.close()

    def _told(self, now: Mapping[str, str]) -> None:
        self._loop.call_soon_threadsafe(self._follow, now)

    def _follow(self, now: Mapping[str, str]) -> None:
        """These engines there are."""
        for name in self._names - now.keys():
            self._router.remove(name)
        for name in now.keys() - self._names:
            self._router.add(name, now[name])
        self._names = set(now)

    def _summon(self) -> None:
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        """A call that waits for a replica: with none, Ray starts one for it."""
        try:
            await self._engines.wake.remote()
        except Exception as problem:  # whatever Ray raises: the request that waits asks again
            _log.warning("no engine could be asked for: %r", problem)
            await asyncio.sleep(LOOK_SECONDS)

    async def _follow_root(self, root: AdapterRoot) -> None:
        while True:
            await asyncio.sleep(ROOT_SECONDS)
            await self._look_at(root)

    async def _look_at(self, root: AdapterRoot) -> None:
        try:
            self._router.offer(await asyncio.to_thread(root.look))
        except OSError as problem:  # all adapters stay as they were
            _log.warning("the adapters' root cannot be read: %s", problem)

    async def _fetch(self, engine: str, offer: Offer) -> str:
        """Have an engine's replica bring an adapter to its host. Raises EngineDeadError when that is gone meanwhile."""
        call = asyncio.create_task(self._call_fetch(engine, offer))
        try:
            while not call.done():
                await asyncio.wait([call], timeout=LOOK_SECONDS)
                if engine not in self._names:  # Ray would wait for it to come back
                    raise EngineDeadError("the engine's replica is gone", "engine_dead", 1.0)
            return call.result()
        except RayActorError as problem:
            raise EngineDeadError("the engine's replica died", "engine_dead", 1.0) from problem
        except (RayTaskError, ValueError, OSError) as problem:
            _log.warning("adapter %r could not be fetched: %r", offer.name, problem)
            raise ServerError(f"adapter {offer.name!r} could not be fetched", "adapter_error") from problem
        finally:
            call.cancel()

    async def _call_fetch(self, engine: str, offer: Offer) -> str:
        root = self._root.place if self._root is not None else ""
        return str(
            await self._engines.fetch.remote(replica=engine, root=root, folder=offer.path, version=offer.version)
        )

    async def _meet(self) -> None:
        """The first call of a handle is what connects it with Ray's controller; it would start an engine where there is
        none, so it is made when there is one.
        """
        while not self._names:
            with contextlib.suppress(Exception):  # the controller is being replaced; the next look finds it
                if await asyncio.to_thread(engines_run, self._application):
                    self._summon()
            await asyncio.sleep(LOOK_SECONDS)


def engines_run(application: str) -> bool:
    """Whether Ray has an engine of this fleet that takes requests."""
    found = serve.status().applications.get(application)
    return found is not None and found.deployments["engine"].replica_states.get("RUNNING", 0) > 0
