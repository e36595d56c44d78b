"""Adapters that clients load, unload and list."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ..protocol.messages import (
    AdapterInfo,
    ChatTemplatesFound,
    Done,
    Error,
    ErrorCode,
    GetChatTemplates,
    LoadAdapter,
    UnloadAdapter,
)
from ..protocol.templates import fitting
from ..text.chat_files import ChatTemplates
from .connections import Client, Connections
from .gpu_link import Answer, LoadedAdapter
from .open_requests import OpenRequests
from .state import ServerState
from .stepper import Stepper
from .submissions import LOADING_RETRY


class AdapterDesk:
    """Loads and unloads go to the GPU process under a ticket; its answer goes to the client that asked.

    admin    clients may load and unload
    roots    directories under which a loaded adapter must lie
    changed  is told of each change, before the client is: the name, and the directory or None
    """

    def __init__(
        self,
        state: ServerState,
        connections: Connections,
        requests: OpenRequests,
        admin: bool,
        roots: list[str],
        changed: Callable[[str, str | None], None],
    ) -> None:
        self._state, self._connections, self._requests = state, connections, requests
        self._admin, self._roots, self._changed = admin, roots, changed
        self._tickets: dict[int, tuple[Client, int, LoadAdapter | UnloadAdapter]] = {}
        self._next_ticket = 0

    def change(self, client: Client, message: LoadAdapter | UnloadAdapter) -> None:
        """Have an adapter loaded or unloaded, or answer why not."""
        refusal = self._refusal(message)
        if refusal is not None or self._state.stepper is None:
            code, text = refusal or ("loading", "the model is being loaded")
            self._connections.say(
                client, Error(code, text, call=message.call, retry_after=LOADING_RETRY if code == "loading" else None)
            )
            return
        self._next_ticket += 1
        self._tickets[self._next_ticket] = client, message.call, message
        if isinstance(message, LoadAdapter):
            self._state.stepper.read_adapter(self._next_ticket, message.name, message.path, message.replace)
        else:
            self._state.stepper.retire(message.name)
            self._state.stepper.drop_adapter(self._next_ticket, message.name)

    def _refusal(self, message: LoadAdapter | UnloadAdapter) -> tuple[ErrorCode, str] | None:
        if not self._admin:
            return (
                "forbidden",
                "adapters cannot be loaded or unloaded through this server; start it with --allow-adapter-loading",
            )
        if self._state.stepper is None:
            return "loading", "the model is being loaded"
        if self._state.draining:
            return "draining", "the server is about to stop"
        if any(pending.name == message.name for _, _, pending in self._tickets.values()):
            return "adapter_in_use", f"adapter {message.name!r} is being loaded or unloaded at this moment"
        known = self._state.stepper.known.get(message.name)
        if isinstance(message, UnloadAdapter):
            return self._unload_refusal(self._state.stepper, message.name, known)
        if self._state.stepper.ready.num_slots == 0:
            return (
                "adapter_error",
                "the server was started without adapter slots; start it with an adapter, or with --max-loras N and "
                "--max-lora-rank R",
            )
        if known and not message.replace:
            text = f"adapter {message.name!r} already exists; choose another name, or give replace=True"
            return "adapter_in_use", text
        if not within(message.path, self._roots):
            return "forbidden", _outside(message.path)
        return None

    def _unload_refusal(self, stepper: Stepper, name: str, known: LoadedAdapter | None) -> tuple[ErrorCode, str] | None:
        if known is None:
            return "unknown_adapter", f"adapter {name!r} is not known; list_adapters tells which are"
        # the engine has those that wait, run or are suspected; not those whose prompts are being tokenized
        if stepper.scheduler.states.waiting.active(known.number) or any(
            request.adapter == name and not request.admitted for request in self._requests.all()
        ):
            return "adapter_in_use", f"adapter {name!r} has open requests; wait for them or abort them"
        return None

    def answered(self, answer: Answer) -> None:
        """The GPU process has read or dropped an adapter, or could not."""
        client, call, asked = self._tickets.pop(answer.ticket)
        if answer.problem is None:
            self._changed(asked.name, asked.path if isinstance(asked, LoadAdapter) else None)
        if answer.adapter is not None and self._state.stepper is not None:
            self._state.stepper.register(answer.adapter)
        if client.gone:
            return
        if answer.problem is not None:
            self._connections.say(client, Error("adapter_error", answer.problem[:4096], call=call))
        else:
            self._connections.say(client, Done(call))

    def chat_templates(self, asked: GetChatTemplates) -> ChatTemplatesFound:
        """Return the templates of an adapter's directory; none for one that is not known."""
        stepper = self._state.stepper
        known = None if stepper is None else stepper.known.get(asked.adapter)
        found = fitting(ChatTemplates() if known is None else known.chat.templates)
        return ChatTemplatesFound(asked.call, dict(found.templates), dict(found.tokens))

    def infos(self) -> list[AdapterInfo]:
        """All adapters that requests may name."""
        stepper = self._state.stepper
        return [] if stepper is None else [_info(stepper, adapter) for adapter in stepper.known.values()]

    def engine_died(self, retry_after: float | None) -> None:
        """Tell the clients that wait for an answer of the GPU process."""
        for client, call, _ in self._tickets.values():
            if not client.gone:
                error = Error("engine_dead", "the engine died", call=call, retry_after=retry_after)
                self._connections.say(client, error)
        self._tickets.clear()


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


def _outside(path: str) -> str:
    """Why a path may not be read."""
    if path.startswith("~") or not os.path.isabs(path):
        return (
            f"the path {path[:100]!r} is not absolute, and a server expands no `~` and resolves no hub id; give the "
            "whole path of a directory on the server's machine"
        )
    return (
        "the path is outside the directories that adapters may be loaded from; start the server with --adapter-root DIR"
    )


def within(path: str, roots: list[str]) -> bool:
    """Whether a path, links resolved, lies under one of the roots."""
    resolved = Path(os.path.realpath(path))  # Path.resolve raises for links in a circle
    return any(resolved.is_relative_to(os.path.realpath(root)) for root in roots)
