"""Load, unload and list adapters for clients."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from msgspec import structs

from ...graphs.adapter_config import CONFIG
from ..adapters.remote_adapter import is_remote, remote_address
from ..api.adapter_sum import SUM_PATH, is_sum, sum_parts
from ..api.errors import RequestError, some_of
from ..protocol.adapter_map import UPDATE_PATH, AdapterEntry, AdapterMap, HybridClock, Stamp, StampError
from ..protocol.chat_templates import within_limits
from ..protocol.messages import (
    MAX_ENTRIES,
    AdapterInfo,
    Adapters,
    ChatTemplatesFound,
    Done,
    ErrorCode,
    GetChatTemplates,
    ListAdapters,
    LoadAdapter,
    UnloadAdapter,
)
from ..text.chat_files import ChatTemplates
from .connections import ClientConnection, Connections
from .gpu_link import Load, LoadedAdapter, LoadReply, Retire, Unload, changed_files
from .open_requests import OpenRequests
from .server_state import ServerState
from .stepper import Stepper
from .submissions import LOADING_RETRY

NO_NUMBER = -2
"""Of a named sum that no request has used yet."""


class AdapterRequests:
    """Sends loads and unloads to the GPU process under a ticket, and its replies to the clients.

    admin      clients may load and unload
    roots      directories and addresses from which adapters may be loaded
    entries    changes by clients of a former process
    on_change  called with each change, before the client gets its reply
    """

    def __init__(
        self,
        state: ServerState,
        connections: Connections,
        requests: OpenRequests,
        admin: bool,
        roots: list[str],
        entries: Iterable[AdapterEntry],
        on_change: Callable[[AdapterEntry], None],
    ) -> None:
        self._state, self._connections, self._requests = state, connections, requests
        self._admin, self._roots, self._on_change = admin, roots, on_change
        self._pending: dict[int, tuple[ClientConnection, LoadAdapter | UnloadAdapter, Stamp]] = {}
        self._replaced: dict[int, AdapterEntry | None] = {}  # ticket of an unload -> change that it replaced
        self._next_ticket = 0
        self._map = AdapterMap(entries)
        for entry in self._map.entries.values():
            self._name_sum(entry)
        # a change must be later than these also if this host's clock was set back
        last = max((entry.stamp for entry in self._map.entries.values()), default=Stamp())
        self._clock = HybridClock(f"engine-{os.urandom(6).hex()}", last=last)

    def change(self, client: ClientConnection, message: LoadAdapter | UnloadAdapter) -> None:
        """Start to load or unload an adapter, or send an error."""
        stepper = self._state.stepper
        refusal = self._refusal(message)
        if refusal is not None or stepper is None:
            code, text = refusal or ("loading", "the model is being loaded")
            retry_after = LOADING_RETRY if code == "loading" else None
            self._connections.send_error(client, code, text, call=message.call, retry_after=retry_after)
            return
        is_sum_name = isinstance(message, LoadAdapter) and message.path.startswith(SUM_PATH)
        if isinstance(message, LoadAdapter) and not is_sum_name:
            # other servers, and the next one at this address, may have another working directory
            path = remote_address(message.path, self._roots) or str(Path(message.path).absolute())
            message = structs.replace(message, path=path)
        stamp = message.stamp or self._clock.tick()
        served = stepper.adapters.get(message.name)
        if isinstance(message, UnloadAdapter) or is_sum_name:
            location = message.path if isinstance(message, LoadAdapter) else None
            replaced = self._merge(AdapterEntry(message.name, stamp, location))
            if served is None:
                self._connections.send(client, Done(message.call, replaced))
                return
            stepper.remove_adapter(message.name)
            self._replaced[self._next_ticket + 1] = replaced
        elif message.content and served is not None and served.content == message.content:
            replaced = self._merge(AdapterEntry(message.name, stamp, message.path, message.content))
            self._connections.send(client, Done(message.call, replaced))
            return
        self._next_ticket += 1
        self._pending[self._next_ticket] = client, message, stamp
        if isinstance(message, LoadAdapter) and not is_sum_name:
            # names are checked here; in the GPU process a refused version may still have the name
            stepper.link.send(Load(self._next_ticket, message.name, message.path, replace=True))
        else:
            stepper.link.send(Unload(self._next_ticket, message.name))

    def is_changing(self, name: str) -> bool:
        """Return whether an adapter is being loaded or unloaded."""
        return any(pending.name == name for _, pending, _ in self._pending.values())

    def merge_update(self, name: str, version: int, content: str) -> AdapterEntry:
        """Keep an update as the last change of an adapter, and return it."""
        entry = AdapterEntry(name, self._clock.tick(), f"{UPDATE_PATH}{version}", content)
        self._map.merge(entry)
        return entry

    def _merge(self, entry: AdapterEntry) -> AdapterEntry | None:
        """Keep an entry if it is newer. Return the one that it replaced, also if another router passed it on before."""
        if self._map.merge(entry):
            self._on_change(entry)
            self._name_sum(entry)
        last = self._map.entries.get(entry.name)
        return self._map.former(entry.name) if last is not None and last.stamp == entry.stamp else None

    def _name_sum(self, entry: AdapterEntry) -> None:
        self._state.named_sums.pop(entry.name, None)
        if entry.path is not None and entry.path.startswith(SUM_PATH):
            self._state.named_sums[entry.name] = entry.path.removeprefix(SUM_PATH)

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
        if self.is_changing(name) or self._state.updating[name]:
            return "adapter_in_use", f"adapter {name!r} is being loaded or unloaded at this moment"
        if message.stamp is not None:
            try:
                self._clock.observe(message.stamp)
            except StampError as problem:
                return "invalid_request", f"adapter {name!r}: {problem}"
            if self._map.is_outdated(name, message.stamp):
                return "adapter_changed", f"a later change of adapter {name!r} has been applied"
        adapter = stepper.adapters.get(name)
        if isinstance(message, UnloadAdapter):
            return None if message.stamp is not None else self._unload_refusal(stepper, name, adapter)
        if stepper.ready.num_slots == 0:
            return (
                "adapter_error",
                "the server was started without adapter slots; start it with an adapter, or with --max-loras N and "
                "--max-lora-rank R",
            )
        if (adapter or name in self._state.named_sums) and not message.replace:
            return "adapter_in_use", f"adapter {name!r} has already been loaded; use another name, or give replace=True"
        if message.path.startswith(SUM_PATH):
            return self._sum_refusal(stepper, message)
        if not is_within(message.path, self._roots) and remote_address(message.path, self._roots) is None:
            return "forbidden", _path_error(message.path)
        return None

    def _sum_refusal(self, stepper: Stepper, message: LoadAdapter) -> tuple[ErrorCode, str] | None:
        """Return why a name cannot be given to a sum. A change of another server may come before its adapters."""
        text = message.path.removeprefix(SUM_PATH)
        if not is_sum(text) and text not in stepper.adapters:
            return "invalid_request", f"{text[:140]!r} is not a sum of adapters, such as a*0.7+b*0.3"
        for part, _ in sum_parts(text):
            if part == message.name or part in self._state.named_sums:
                return "invalid_request", f"adapter {part!r} is a sum; name its adapters and their weights instead"
            if part not in stepper.adapters:
                known = some_of(stepper.adapters)
                text = f"adapter {part!r} is not known (known: {known}); list_adapters lists all"
                return None if message.stamp is not None else ("unknown_adapter", text)
        try:
            stepper.adapter_numbers.check(text)
        except RequestError as problem:
            return "adapter_error", str(problem)
        return None

    def _unload_refusal(
        self, stepper: Stepper, name: str, adapter: LoadedAdapter | None
    ) -> tuple[ErrorCode, str] | None:
        if adapter is None:
            if self._map.loaded(name) is not None:  # its files could not be read again
                return None
            known = some_of(stepper.adapters)
            return "unknown_adapter", f"adapter {name!r} is not known (known: {known}); list_adapters lists all"
        # the engine has waiting, running and suspected requests, but not those whose prompts are being tokenized
        sums = stepper.adapter_numbers
        if any(map(stepper.scheduler.states.waiting.active, [adapter.number, *sums.sums_with(adapter.number)])) or any(
            request.adapter is not None and not request.admitted and name in dict(sums.parts(request.adapter))
            for request in self._requests.all()
        ):
            return "adapter_in_use", f"adapter {name!r} has open requests; wait for them or abort them"
        return None

    def receive_reply(self, reply: LoadReply) -> None:
        """Send the GPU process's reply to the client, if one waits for it."""
        if reply.ticket not in self._pending:
            return
        client, message, stamp = self._pending.pop(reply.ticket)
        replaced = self._replaced.pop(reply.ticket, None)
        problem, adapter, stepper = reply.problem, reply.adapter, self._state.stepper
        if isinstance(message, LoadAdapter) and adapter is not None and stepper is not None:
            if message.content in ("", adapter.content):
                replaced = self._merge(AdapterEntry(message.name, stamp, message.path, adapter.content))
                stepper.add_adapter(adapter)
            else:
                stepper.link.send(Retire(adapter.number))
                problem = changed_files(message.name)
        if problem is not None:
            code = "adapter_error" if adapter is not None else _load_error(message)
            self._connections.send_error(client, code, problem, call=message.call)
        else:
            self._connections.send(client, Done(message.call, replaced))

    def list(self, message: ListAdapters) -> Adapters:
        """Return all adapters, and the changes that the client does not have yet."""
        entries, sequence = self._map.changes(message.after, MAX_ENTRIES)
        stepper = self._state.stepper
        infos = [] if stepper is None else [_info(stepper, adapter) for adapter in stepper.adapters.values()]
        if stepper is not None:
            infos += [_info(stepper, _named_sum(stepper, name)) for name in self._state.named_sums]
        return Adapters(message.call, infos, entries, sequence)

    def chat_templates(self, message: GetChatTemplates) -> ChatTemplatesFound:
        """Return the templates in an adapter's directory; none for an unknown adapter."""
        stepper = self._state.stepper
        adapter = None if stepper is None else stepper.adapters.get(message.adapter)
        found = within_limits(ChatTemplates() if adapter is None else adapter.chat.templates)
        return ChatTemplatesFound(message.call, dict(found.templates), dict(found.tokens))

    def engine_died(self, retry_after: float | None) -> None:
        """Send an error to the clients that wait for a reply of the GPU process."""
        for client, message, _ in self._pending.values():
            self._connections.send_error(
                client, "engine_dead", "the engine died", call=message.call, retry_after=retry_after
            )
        self._pending.clear()
        self._replaced.clear()


def _named_sum(stepper: Stepper, name: str) -> LoadedAdapter:
    """Return a named sum as an adapter, without content if one of its adapters is not loaded."""
    sums = stepper.adapter_numbers
    try:
        number = sums.existing(name)
        return LoadedAdapter(name, NO_NUMBER if number is None else number, sums.rank(name), sums.content(name))
    except RequestError:
        return LoadedAdapter(name, NO_NUMBER, 0, "")


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
    chat, invocation = adapter.chat.digest, list(adapter.invocation)
    users = slots.users(number)
    return AdapterInfo(adapter.name, adapter.rank, adapter.content, where, users, waiting, chat, invocation)


def _load_error(message: LoadAdapter | UnloadAdapter) -> ErrorCode:
    """Return the code of a change that the GPU process could not make. The path of a load is within the roots."""
    if isinstance(message, UnloadAdapter) or is_remote(message.path):
        return "adapter_error"
    return "adapter_error" if os.path.isfile(os.path.join(message.path, CONFIG)) else "adapter_not_found"


def _path_error(path: str) -> str:
    if is_remote(path):
        return (
            "the address is outside the roots for adapters; start the server with --adapter-root ADDRESS, such as "
            f"{path.partition('://')[0][:20]}://..., or give the path of a directory on the server's machine"
        )
    if path.startswith("~") or not os.path.isabs(path):
        return (
            f"the path {path[:100]!r} is not absolute; a server expands no `~`, and reads hub ids only if it "
            "was started with --adapter-root hf://. Give the absolute path of a directory on the server's machine"
        )
    return "the path is outside the directories for adapters; start the server with --adapter-root DIR"


def is_within(path: str, roots: list[str]) -> bool:
    """Return whether a path, with links resolved, is inside one of the roots that are directories."""
    resolved = Path(os.path.realpath(path))  # Path.resolve raises for cyclic links
    return any(resolved.is_relative_to(os.path.realpath(root)) for root in roots if not is_remote(root))
