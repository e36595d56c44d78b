"""Engines whose answers are what a test says: pieces of text with their tokens."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.protocol.messages import Chunk, Usage
from sidestream.runtime.text.chat_files import ChatTemplates
from sidestream.runtime.text.reasoning import CLOSER

from .gateway import FakeEngines

CLOSER_ID = 77


class ScriptedEngines(FakeEngines):
    """Answers `pieces`, one token each, then ends with `reason`. `</think>` is the token CLOSER_ID.

    A request without a stream gets one chunk. `stop`: the stop string that ends an answer, if any.
    """

    def __init__(self, pieces: list[str], reason: str = "stop", template: str | None = None) -> None:
        super().__init__()
        self.pieces, self.reason = pieces, reason
        self.stop: str | None = None
        if template is not None:
            self.info = replace(self.info, templates=ChatTemplates({"default": template}))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        self.asked.append(request)
        if request.when_accepted is not None:
            request.when_accepted(len(request.prompt), "")
        pieces = self.pieces if request.stream else ["".join(self.pieces)]
        tokens = [CLOSER_ID if CLOSER in piece else number for number, piece in enumerate(self.pieces)]
        n = request.params.n
        for place, piece in enumerate(pieces):
            last = place == len(pieces) - 1
            ids = [tokens[place]] if request.stream else tokens
            chunks = []
            for index in range(n):
                usage = Usage(len(request.prompt), n * len(tokens), 1) if last and index == n - 1 else None
                reason = self.reason if last else None
                stop = self.stop if last else None
                chunks.append(Chunk(request.request_id, index, place, piece, ids, reason, stop, usage=usage))  # type: ignore[arg-type]
            left = [chunk for chunk in chunks if not self._taken(request, chunk)]
            if left:
                yield left
            await asyncio.sleep(0)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == CLOSER:
            return [*([1] if add_special_tokens else []), CLOSER_ID]
        return await super().tokenize(text, add_special_tokens)
