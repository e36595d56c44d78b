"""Load, unload and list adapters for clients."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ..protocol.chat_templates import within_limits
from ..protocol.messages import (
    AdapterInfo,
    ChatTemplatesFound,
    Done,
    ErrorCode,
    GetChatTemplates,
    LoadAdapter,
    UnloadAdapter,
)
from ..text.chat_files import ChatTemplates
from .connections import ClientConnection, Connections
from .gpu_link import Load, LoadedAdapter, LoadReply, Unload
from .open_requests import OpenRequests
from .server_state import ServerState
from .stepper import Stepper
from .submissions import LOADING_RETRY


class AdapterRequests:
    """Sends loads and unloads to the GPU process under a ticket, and its replies to the clients.

    admin      clients may load and unload
    roots      directories from which adapters may be loaded
    on_change  called before the client gets its reply: name, and directory or None
    """

    def __init__(
        self,
        state: ServerState,
        connections: Connections,
        requests: OpenRequests,
        admin: bool,
        roots: list[str],
        on_change: Callable[[str, str | None], None],
    ) -> None:
        self._state, self._connections, self._requests = state, connections, requests
        self._admin, self._roots, self._on_change = admin, roots, on_change
        self._pending: dict[int, tuple[ClientConnection, LoadAdapter | UnloadAdapter]] = {}
        self._next_ticket = 0

    def change(self, client: ClientConnection, message: LoadAdapter | UnloadAdapter) -> None:
        """Start to load or unload an adapter, or send an error."""
        stepper = self._state.stepper
        refusal = self._refusal(message)
        if refusal is not None or stepper is None:
            code, text = refusal or ("loading", "the model is being loaded")
            retry_after = LOADING_RETRY if code == "loading" else None
            self._connections.send_error(client, code, text, call=message.call, retry_after=retry_after)
            return
        self._next_ticket += 1
        self._pending[self._next_ticket] = client, message
        if isinstance(message, LoadAdapter):
            stepper.link.send(Load(self._next_ticket, message.name, message.path, message.replace))
        else:
            stepper.remove_adapter(message.name)
            stepper.link.send(Unload(self._next_ticket, message.name))

    def _refusal(self, message: LoadAdapter | UnloadAdapter) -> tuple[ErrorCode, str] | None:
        name, stepper = message.name, self._state.stepper
        if not self._admin:
            return (
                "forbidden",
                "adapters cannot be loaded or unloaded through this server; start it with --allow-adapter-loading",
            )
        if stepper is None:
            return "loading", "the model is being loaded"
        if self._state.draining:
            return "draining", "the server is about to stop"
        if any(pending.name == name for _, pending in self._pending.values()):
            return "adapter_in_use", f"adapter {name!r} is being loaded or unloaded at this moment"
        adapter = stepper.adapters.get(name)
        if isinstance(message, UnloadAdapter):
            return self._unload_refusal(stepper, name, adapter)
        if stepper.ready.num_slots == 0:
            return (
                "adapter_error",
                "the server was started without adapter slots; start it with an adapter, or with --max-loras N and "
                "--max-lora-rank R",
            )
        if adapter and not message.replace:
            return "adapter_in_use", f"adapter {name!r} already exists; choose another name, or give replace=True"
        if not is_within(message.path, self._roots):
            return "forbidden", _path_error(message.path)
        return None

    def _unload_refusal(
        self, stepper: Stepper, name: str, adapter: LoadedAdapter | None
    ) -> tuple[ErrorCode, str] | None:
        if adapter is None:
            return "unknown_adapter", f"adapter {name!r} is not known; list_adapters lists all"
        # the engine has waiting, running and suspected requests, but not those whose prompts are being tokenized
        if stepper.scheduler.states.waiting.active(adapter.number) or any(
            request.adapter == name and not request.admitted for request in self._requests.all()
        ):
            return "adapter_in_use", f"adapter {name!r} has open requests; wait for them or abort them"
        return None

    def receive_reply(self, reply: LoadReply) -> None:
        """Send the GPU process's reply to the client."""
        client, message = self._pending.pop(reply.ticket)
        if reply.problem is None:
            self._on_change(message.name, message.path if isinstance(message, LoadAdapter) else None)
        if reply.adapter is not None and self._state.stepper is not None:
            self._state.stepper.add_adapter(reply.adapter)
        if reply.problem is not None:
            self._connections.send_error(client, "adapter_error", reply.problem, call=message.call)
        else:
            self._connections.send(client, Done(message.call))

    def chat_templates(self, message: GetChatTemplates) -> ChatTemplatesFound:
        """Return the templates in an adapter's directory; none for an unknown adapter."""
        stepper = self._state.stepper
        adapter = None if stepper is None else stepper.adapters.get(message.adapter)
        found = within_limits(ChatTemplates() if adapter is None else adapter.chat.templates)
        return ChatTemplatesFound(message.call, dict(found.templates), dict(found.tokens))

    def infos(self) -> list[AdapterInfo]:
        stepper = self._state.stepper
        return [] if stepper is None else [_info(stepper, adapter) for adapter in stepper.adapters.values()]

    def engine_died(self, retry_after: float | None) -> None:
        """Send an error to the clients that wait for a reply of the GPU process."""
        for client, message in self._pending.values():
            self._connections.send_error(
                client, "engine_dead", "the engine died", call=message.call, retry_after=retry_after
            )
        self._pending.clear()


def _info(stepper: Stepper, adapter: LoadedAdapter) -> AdapterInfo:
    slots, number = stepper.scheduler.states.slots, adapter.number
    where: Literal["gpu", "cpu", "disk", "loading"] = "disk"
    if slots.is_resident(number):
        where = "gpu"
    elif slots.is_loading(number):
        where = "loading"
    elif number in stepper.in_host_memory:
        where = "cpu"
    waiting = len(stepper.scheduler.states.waiting.of(number))
    chat = adapter.chat.digest
    return AdapterInfo(adapter.name, adapter.rank, adapter.content, where, slots.users(number), waiting, chat)


def _path_error(path: str) -> str:
    if path.startswith("~") or not os.path.isabs(path):
        return (
            f"the path {path[:100]!r} is not absolute; a server expands no `~` and resolves no hub id. Give the "
            "absolute path of a directory on the server's machine"
        )
    return "the path is outside the directories for adapters; start the server with --adapter-root DIR"


def is_within(path: str, roots: list[str]) -> bool:
    """Return whether a path, with links resolved, is inside one of the roots."""
    resolved = Path(os.path.realpath(path))  # Path.resolve raises for cyclic links
    return any(resolved.is_relative_to(os.path.realpath(root)) for root in roots)
