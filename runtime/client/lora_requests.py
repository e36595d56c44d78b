"""Load the adapters of vLLM's LoRARequest on the server."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..api.adapter_sum import with_sum_names
from ..api.errors import RequestError
from ..api.lora_request import LoRARequest
from ..protocol.messages import AdapterInfo


class LoraRequests:
    """Resolves LoRARequests to adapter names; the server loads unknown adapters from its own directories.

    list_adapters  returns the server's adapters
    load           loads an adapter: name, directory
    """

    def __init__(
        self, list_adapters: Callable[[], Awaitable[list[AdapterInfo]]], load: Callable[[str, str], Awaitable[None]]
    ) -> None:
        self._list_adapters, self._load = list_adapters, load
        self._loaded: dict[str, str] = {}
        self._lock = asyncio.Lock()

    async def resolve(self, adapter: Any, lora_request: Any) -> Any:
        """Return the names of adapters or sums of a call's `adapter` or `lora_request`, one or a list (None: the base
        model).

        Raises RequestError for both together, other types, and a name that this client loaded from another directory.
        """
        if lora_request is None:
            return with_sum_names(adapter)
        if adapter is not None:
            raise RequestError("adapter and lora_request both name the adapter; give one of them")
        several = isinstance(lora_request, Sequence) and not isinstance(lora_request, str)
        entries = list(lora_request) if several else [lora_request]
        wrong = next((each for each in entries if each is not None and not isinstance(each, LoRARequest)), None)
        if wrong is not None:
            kind = type(wrong).__name__
            raise RequestError(f"lora_request must be a LoRARequest, a list of them or None, not {kind}")
        with_path = [each for each in dict.fromkeys(entries) if each is not None and each.lora_path]
        if with_path:
            async with self._lock:
                await self._load_unknown(with_path)
        names = [None if each is None else each.lora_name for each in entries]
        return names if several else names[0]

    async def _load_unknown(self, requests: list[LoRARequest]) -> None:
        known = {info.name for info in await self._list_adapters()}
        for each in requests:
            if each.lora_name not in known:
                await self._load(each.lora_name, each.lora_path)
                self._loaded[each.lora_name] = each.lora_path
                known.add(each.lora_name)
            elif self._loaded.get(each.lora_name, each.lora_path) != each.lora_path:
                raise RequestError(
                    f"adapter {each.lora_name!r} was loaded from another directory than {each.lora_path!r}; use "
                    "another name, or load_adapter(..., replace=True)"
                )
