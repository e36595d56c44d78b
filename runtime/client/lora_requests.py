"""LoRARequests of a client's callers, as names of adapters that the server has."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..api.errors import RequestError
from ..api.lora_request import LoRARequest
from ..protocol.messages import AdapterInfo


class LoraRequests:
    """Has an adapter loaded, from its directory on the server's machine, if the server does not know its name.

    listed   asks the server which adapters it has
    load     has it load one: name, directory
    """

    def __init__(
        self, listed: Callable[[], Awaitable[list[AdapterInfo]]], load: Callable[[str, str], Awaitable[None]]
    ) -> None:
        self._listed, self._load = listed, load
        self._loaded: dict[str, str] = {}
        self._one_at_a_time = asyncio.Lock()

    async def names(self, adapter: Any, asked: Any) -> Any:
        """What `adapter=` or `lora_request=` of a call names, one for all or one a prompt (None: the base model).

        Raises RequestError when both are given, for what is no LoRARequest, and for a name that this client had loaded
        from another directory. The directories of other adapters are the server's business.
        """
        if asked is None:
            return adapter
        if adapter is not None:
            raise RequestError("adapter and lora_request name the same thing; give one of them")
        entries = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
        wrong = next((each for each in entries if each is not None and not isinstance(each, LoRARequest)), None)
        if wrong is not None:
            kind = type(wrong).__name__
            raise RequestError(f"lora_request must be a LoRARequest, a list of them or None, not {kind}")
        paths = [each for each in dict.fromkeys(entries) if each is not None and each.lora_path]
        if paths:
            async with self._one_at_a_time:
                await self._make_known(paths)
        names = [None if each is None else each.lora_name for each in entries]
        return names if isinstance(asked, Sequence) else names[0]

    async def _make_known(self, paths: list[LoRARequest]) -> None:
        known = {info.name for info in await self._listed()}
        for each in paths:
            if each.lora_name not in known:
                await self._load(each.lora_name, each.lora_path)
                self._loaded[each.lora_name] = each.lora_path
                known.add(each.lora_name)
            elif self._loaded.get(each.lora_name, each.lora_path) != each.lora_path:
                raise RequestError(
                    f"adapter {each.lora_name!r} was loaded from another directory than {each.lora_path!r}; use "
                    "another name, or load_adapter(..., replace=True)"
                )
