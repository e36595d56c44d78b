"""Updates adapters on all engines from the bytes of an HTTP body, through files in the engines' socket directories."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ...api.adapter_update import write_at
from ...api.adapter_versions import AdapterVersion
from ...api.errors import RequestError, ServerError
from ...client.async_client import AsyncClient
from ...protocol.adapter_map import UPDATE_PATH
from ..interfaces import AdapterUpload, GatewayError, UpdatedAdapter
from .adapter_catalogue import AdapterCatalogue
from .adapter_changes import AdapterChanges
from .engine_link import LOAD_SECONDS, EngineLink

MAX_UPLOADS = 4
"""Updates at a time: each holds memory of its size on every engine."""


class _Target:
    """An engine that is updated. Its connection has a buffer of its own, which goes with it."""

    def __init__(self, link: EngineLink, client: AsyncClient) -> None:
        self.name, self.client = link.name, client
        self.handle, self.token = -1, ""

    async def open(self, nbytes: int) -> None:
        """Open a buffer of the engine. Raises GatewayError 413 if the update is too large."""
        try:
            self.handle, self.token = await self.client.open_update_buffer(nbytes)
        except RequestError as problem:
            raise GatewayError(413, f"the body is too large: {problem}") from None

    async def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        await self.client.close()


class AdapterUpdates:
    """Updates on the engines of a router.

    keys       folder of the gateway's keys, for connections of its own
    no_engine  returns the error for changes that no engine can apply
    """

    def __init__(
        self,
        links: Mapping[str, EngineLink],
        catalogue: AdapterCatalogue,
        changes: AdapterChanges,
        keys: str | Path | None,
        no_engine: Callable[[], ServerError],
    ) -> None:
        self._links, self._catalogue, self._changes, self._keys = links, catalogue, changes, keys
        self._no_engine = no_engine
        self._open = 0

    async def update(self, name: str, upload: AdapterUpload) -> UpdatedAdapter:
        """Make an upload the newest version of an adapter on all connected engines.

        The body is written into buffers of all engines before one of them gets the version. An engine that then refuses
        it keeps its former version, and gets no requests for the name: `failed` has its error. Raises the errors of
        the last engine if none has the new version, and OverloadedError while an engine loads.
        """
        if self._open >= MAX_UPLOADS:
            text = f"{MAX_UPLOADS} adapters are being updated at this moment; send the update again later"
            raise GatewayError(429, text, "rate_limit_error", "too_many_updates", retry_after=1.0)
        links = [link for link in self._links.values() if link.lost_at is None]
        remote = [link.name for link in links if link.client.address.path is None]
        if remote:
            text = (
                f"{', '.join(remote)} shares no memory with the gateway, so that no update can be written there: save "
                "the adapter to a directory and use /v1/load_lora_adapter"
            )
            raise GatewayError(501, text, code="not_shared")
        if not links:
            raise self._no_engine()
        self._open += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                targets = []
                for link in links:
                    target = _Target(link, AsyncClient(str(link.client.address), keys=self._keys, name="gateway"))
                    stack.push_async_callback(target.close)
                    await target.open(upload.nbytes)
                    targets.append(target)
                await _write(targets, upload)
                async with self._changes.changing(name):
                    return await self._apply(name, upload, targets)
        finally:
            self._open -= 1

    async def _apply(self, name: str, upload: AdapterUpload, targets: list[_Target]) -> UpdatedAdapter:
        """Update the first engine, which checks the update, and then the others with the same version."""
        version, made = upload.version or self._next_version(name), None
        failed: dict[str, Exception] = {
            link.name: ServerError("the engine is down", "engine_dead")
            for link in self._links.values()
            if link.lost_at is not None
        }
        while made is None and targets:
            made = await self._apply_one(name, upload, version, targets.pop(0), failed)
        others = await asyncio.gather(
            *(self._apply_one(name, upload, None if made is None else made.version, each, failed) for each in targets)
        )
        if made is None:
            raise list(failed.values())[-1]
        updated = [each for each in others if each is not None]
        return UpdatedAdapter(
            made.version, made.content, 1 + len(updated), {engine: str(error) for engine, error in failed.items()}
        )

    async def _apply_one(
        self, name: str, upload: AdapterUpload, version: int | None, target: _Target, failed: dict[str, Exception]
    ) -> AdapterVersion | None:
        """Update one engine. Adds its error to `failed`, and then returns None."""
        try:
            return await target.client.apply_update(
                name, target.token, upload.nbytes, version, upload.inflight, LOAD_SECONDS
            )
        except (RequestError, ServerError, TimeoutError) as problem:
            failed[target.name] = problem
            return None

    def _next_version(self, name: str) -> int | None:
        """Return the version after the last update that any engine has; None if the engines should choose."""
        entry = self._catalogue.changes.loaded(name)
        if entry is None or entry.path is None or not entry.is_update:
            return None
        return int(entry.path.removeprefix(UPDATE_PATH)) + 1


async def _write(targets: list[_Target], upload: AdapterUpload) -> None:
    """Write the parts of an upload into the buffers of all engines. Raises GatewayError 507 without memory."""

    def write(part: bytes, offset: int) -> None:
        for target in targets:
            write_at(target.handle, memoryview(part), offset)

    offset = 0
    async with contextlib.aclosing(upload.parts) as parts:
        async for part in parts:
            try:
                await asyncio.to_thread(write, part, offset)
            except OSError as problem:
                text = f"the update could not be written into shared memory: {problem.strerror}"
                raise GatewayError(507, text, "server_error") from None
            offset += len(part)
