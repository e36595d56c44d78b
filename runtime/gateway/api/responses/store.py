"""Stored responses, in the memory of this gateway: retrieval, continuing, references to items, cancelling."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from ...interfaces import GatewayError
from ..chat.request import ChatMessage
from ..completion_session import CompletionSession
from .items import InputItem, InputPart, messages_of
from .output import FunctionCallItem, OutputItem, ReasoningItem, Response
from .request import ResponseRequest

MAX_STORED_BYTES = 256 << 20
_encoder = msgspec.json.Encoder()


@dataclass(eq=False)
class StoredResponse:
    """A response that only its key's owner may use. `session`, `task`: of one in the background.

    messages  the conversation without instructions; from `finish` on with the answer
    items     item id -> item of the answer, as a later input
    """

    owner: str
    response: Response
    messages: list[ChatMessage]
    session: CompletionSession | None = None
    task: asyncio.Task[None] | None = None
    items: dict[str, InputItem] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def is_open(self) -> bool:
        """Whether the answer is not complete yet."""
        return self.response.status in ("queued", "in_progress")

    def finish(self, response: Response) -> None:
        """Set the final response."""
        self.response = response
        self.items = {item.id: _as_input(item) for item in response.output}
        self.messages = [*self.messages, *messages_of(list(self.items.values()))]

    async def cancel(self) -> None:
        """Stop computing a response in the background."""
        if self.session is None or self.task is None or not self.is_open:
            return
        self.response = structs.replace(self.response, status="cancelled")
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.session.close()  # of a task that was cancelled before it ran


def _as_input(item: OutputItem) -> InputItem:
    if isinstance(item, FunctionCallItem):
        call = {name: getattr(item, name) for name in ("id", "call_id", "name", "arguments")}
        return InputItem(type="function_call", **call)
    thinks = isinstance(item, ReasoningItem)
    parts = [InputPart(type=part.type, text=part.text) for part in item.content]
    return InputItem(type="reasoning" if thinks else "message", id=item.id, role="assistant", content=parts)


class ResponseStore:
    """At most `capacity` responses of together MAX_STORED_BYTES; 0: none. If it is full, the owner with the most
    responses (or bytes) loses the oldest finished one.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._owners: dict[str, dict[str, StoredResponse]] = {}
        self._nbytes: Counter[str] = Counter()
        self._open: set[StoredResponse] = set()

    def get(self, owner: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """Return a response. Raises GatewayError 404 if the owner has none with this id."""
        self._check_enabled(param, True)
        found = self._owners.get(owner, {}).get(response_id)
        if found is None:
            raise GatewayError(
                404,
                f"Response with id {response_id[:100]!r} not found. This gateway keeps the last {self.capacity}, "
                "and none over a restart or with store=false; send the whole conversation in input",
                code="response_not_found",
                param=param,
            )
        return found

    def stores(self, body: ResponseRequest) -> bool:
        """Return whether the response to a body is stored. Raises GatewayError 400 for fields that contradict that."""
        self._check_enabled("background", body.background)
        self._check_enabled("previous_response_id", body.previous_response_id)
        stored = self.capacity > 0 and body.store is not False
        if body.background and not stored:
            raise GatewayError(400, "background can only be used when `store` is true", param="background")
        if body.background and body.stream:
            raise GatewayError(400, "background does not work with stream; omit one", param="background")
        return stored

    def _check_enabled(self, name: str, value: object) -> None:
        if value and not self.capacity:
            raise GatewayError(
                400,
                f"{name} is not supported while nothing is stored; send the whole conversation in input without it, or "
                "start the server with --store-responses 1000",
                code="unsupported_parameter",
                param=name,
            )

    def conversation(self, owner: str, body: ResponseRequest) -> list[ChatMessage]:
        """Return the messages of a body after those of its previous response, with references to items resolved.

        Raises GatewayError 400 that names the item, 404 for an unknown previous response.
        """
        previous: list[ChatMessage] = []
        if body.previous_response_id is not None:
            found = self.get(owner, body.previous_response_id, "previous_response_id")
            if found.is_open:
                text = f"the response {body.previous_response_id!r} is not complete yet; retrieve it until it is"
                raise GatewayError(409, text, code="response_not_complete", param="previous_response_id")
            previous = found.messages
        if isinstance(body.input, str):
            return [*previous, ChatMessage(role="user", content=body.input)]
        items = [self._resolved(owner, item, index) for index, item in enumerate(body.input)]
        return [*previous, *messages_of(items)]

    def _resolved(self, owner: str, item: InputItem, index: int) -> InputItem:
        if item.type != "item_reference":
            return item
        for stored in reversed(self._owners.get(owner, {}).values()):
            if item.id in stored.items:
                return stored.items[item.id]
        state = "any more" if self.capacity else "(store is off, see --store-responses)"
        raise GatewayError(
            400,
            f"input[{index}] refers to the item {item.id!r}, which is not stored {state}; send the item itself, as "
            "SDKs do with store=false",
            code="item_not_found",
            param=f"input[{index}]",
        )

    def add(self, stored: StoredResponse) -> None:
        """Store a response, and again when it is finished. Raises GatewayError 429 if too many are open."""
        nbytes = len(_encoder.encode((stored.response, stored.messages)))
        self._open.discard(stored)
        if stored.is_open:
            used = sum(each.nbytes for each in self._open)
            if len(self._open) >= self.capacity or used + nbytes > MAX_STORED_BYTES:
                text = f"{len(self._open)} responses are computed in the background; retry later, or use stream"
                raise GatewayError(429, text, "rate_limit_error", "too_many_requests", retry_after=1.0)
            self._open.add(stored)
        self._nbytes[stored.owner] += nbytes - stored.nbytes
        stored.nbytes = nbytes
        self._owners.setdefault(stored.owner, {})[stored.response.id] = stored
        while sum(map(len, self._owners.values())) > self.capacity:
            self._evict(lambda owner: len(self._owners[owner]))
        while self._nbytes.total() > MAX_STORED_BYTES:
            self._evict(lambda owner: self._nbytes[owner])

    def _evict(self, size: Callable[[str], int]) -> None:
        """Drop the oldest finished response of the owner with the largest size who has one."""
        for owner in sorted(self._owners, key=size, reverse=True):
            for stored in self._owners[owner].values():
                if not stored.is_open:
                    self.remove(stored)
                    return

    def remove(self, stored: StoredResponse) -> None:
        """Drop a response, if it is still stored."""
        owner = stored.owner
        responses = self._owners.get(owner, {})
        if responses.pop(stored.response.id, None) is None:
            return
        self._open.discard(stored)
        self._nbytes[owner] -= stored.nbytes
        stored.nbytes = 0
        if not responses:
            del self._owners[owner], self._nbytes[owner]
