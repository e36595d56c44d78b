"""Update adapters from clients' memory, and unload versions of them."""

from collections import Counter
from collections.abc import Callable, Iterator

from ...api.adapter_versions import AdapterVersion, names_to_remove, split_version, version_of
from ...api.errors import RequestError, some_of
from ...protocol.adapter_map import AdapterEntry
from ...protocol.messages import Done, ErrorCode, OpenBuffer, UnloadAdapter, UpdateAdapter, Updated
from ..adapter_requests import AdapterRequests
from ..connections import ClientConnection, Connections
from ..gpu_link import Unload, Update, UpdateReply
from ..server_state import ServerState
from ..stepper import Stepper
from ..submissions import LOADING_RETRY
from .buffers import UpdateBuffers

MAX_PENDING = 2
"""Updates of one name at a time: one is applied, one waits."""


class UpdateRequests:
    """Sends updates to the GPU process under a ticket, and its replies to the clients.

    admin      clients may change adapters
    on_change  called with the change of a name, if there is one, and all versions that are kept, before the client gets
               its reply
    """

    def __init__(
        self,
        state: ServerState,
        connections: Connections,
        adapters: AdapterRequests,
        buffers: UpdateBuffers,
        admin: bool,
        on_change: Callable[[AdapterEntry | None, list[AdapterVersion]], None],
    ) -> None:
        self._state, self._connections, self._adapters = state, connections, adapters
        self._buffers, self._admin, self._on_change = buffers, admin, on_change
        self._pending: dict[int, tuple[ClientConnection, UpdateAdapter]] = {}
        self._next_ticket = 0

    def open_buffer(self, client: ClientConnection, message: OpenBuffer) -> None:
        """Send the client its buffer, or an error."""
        refusal = self._forbidden()
        try:
            if refusal is None:
                self._connections.send(client, self._buffers.open(client, message))
        except (RequestError, OSError) as problem:
            text = str(problem) if isinstance(problem, RequestError) else f"no buffer could be made: {problem.strerror}"
            refusal = "invalid_request", text
        if refusal is not None:
            self._connections.send_error(client, *refusal, call=message.call)

    def update(self, client: ClientConnection, message: UpdateAdapter) -> None:
        """Start to update an adapter, or send an error."""
        stepper, refusal = self._state.stepper, self._refusal(message)
        try:
            path = "" if refusal is not None else self._buffers.path(client, message)
        except RequestError as problem:
            refusal = "invalid_request", str(problem)
        if refusal is not None or stepper is None:
            self._refuse(client, refusal, message.call)
            return
        self._next_ticket += 1
        self._pending[self._next_ticket] = client, message
        self._state.updating[message.name] += 1
        switch = message.inflight == "switch"
        stepper.link.send(Update(self._next_ticket, message.name, path, message.bytes, message.version, switch))

    def unload(self, client: ClientConnection, message: UnloadAdapter) -> None:
        """Unload an old version of an adapter, or send an error. Running requests keep it until they end."""
        stepper, name = self._state.stepper, message.name
        refusal = self._refusal(message)
        if refusal is None and stepper is not None:
            try:
                if name not in stepper.adapters:
                    known = some_of(stepper.adapters)
                    refusal = (
                        "unknown_adapter",
                        f"adapter {name!r} is not known (known: {known}); list_adapters lists all",
                    )
                else:
                    names_to_remove(name, stepper.adapters)
            except RequestError as problem:
                refusal = "adapter_in_use", str(problem)
        if refusal is not None or stepper is None:
            self._refuse(client, refusal, message.call)
            return
        stepper.remove_adapter(name)
        stepper.link.send(Unload(0, name))
        self._on_change(None, list(_versions(stepper)))
        self._connections.send(client, Done(message.call))

    def _forbidden(self) -> tuple[ErrorCode, str] | None:
        if not self._admin:
            text = "adapters cannot be changed through this server; start it with --allow-adapter-loading"
            return "forbidden", text
        return None

    def _refusal(self, message: UpdateAdapter | UnloadAdapter) -> tuple[ErrorCode, str] | None:
        name, stepper = split_version(message.name)[0], self._state.stepper
        if (forbidden := self._forbidden()) is not None:
            return forbidden
        if stepper is None:
            return "loading", "the model is being loaded"
        if self._state.draining:
            return "draining", "the server is about to stop"
        if self._adapters.is_changing(name) or self._state.updating[name] >= MAX_PENDING:
            text = f"adapter {name!r} is being changed at this moment, and another change waits; wait for an answer"
            return "adapter_in_use", text
        if name in self._state.named_sums:
            return "invalid_request", f"adapter {name!r} is a sum; unload it, or update one of its adapters"
        return None

    def _refuse(self, client: ClientConnection, refusal: tuple[ErrorCode, str] | None, call: int) -> None:
        code, text = refusal or ("loading", "the model is being loaded")
        retry_after = LOADING_RETRY if code == "loading" else None
        self._connections.send_error(client, code, text, call=call, retry_after=retry_after)

    def receive_reply(self, reply: UpdateReply) -> None:
        """Apply an update that the GPU process has packed, and send the client its reply."""
        client, message = self._pending.pop(reply.ticket)
        self._state.updating -= Counter([message.name])
        adapter, stepper = reply.adapter, self._state.stepper
        if adapter is None or stepper is None:
            self._connections.send_error(client, reply.code, reply.problem, call=message.call)
            return
        version = version_of(adapter.name)
        stepper.update_adapter(adapter, reply.removed, message.inflight == "switch")
        entry = self._adapters.merge_update(message.name, version, adapter.content)
        self._on_change(entry, list(_versions(stepper)))
        self._connections.send(client, Updated(message.call, message.name, version, adapter.content))

    def engine_died(self, retry_after: float | None) -> None:
        """Send an error to the clients that wait for a reply of the GPU process."""
        for client, message in self._pending.values():
            text = "the engine died; the adapter has its former version"
            self._connections.send_error(client, "engine_dead", text, call=message.call, retry_after=retry_after)
        self._pending.clear()
        self._state.updating.clear()


def _versions(stepper: Stepper) -> Iterator[AdapterVersion]:
    """Yield the versions of all adapters, the oldest of each first."""
    found = [(*split_version(adapter.name), adapter.content) for adapter in stepper.adapters.values()]
    for name, version, content in sorted((each for each in found if each[1] is not None), key=lambda each: each[:2]):
        yield AdapterVersion(name, version or 0, content)
