"""Writes prompts and answers to the usage log, where `--log-payloads` asks for it."""

import msgspec

from ...protocol.messages import Chunk
from ..contracts import Exchange, UsageRecord
from ..metrics.listener import Listener
from .usage_log import UsageLog
from .usage_schema import Payload

MAX_CHARACTERS = 1 << 20
_encode = msgspec.json.Encoder().encode


class PayloadLog(Listener):
    """Keeps what was asked and answered, up to a million characters of each, as JSON:
    `prompts` (texts or token ids), `answers` (for each prompt, completions by index), `truncated`.
    """

    def __init__(self, log: UsageLog) -> None:
        self._log = log
        self._answers: dict[int, _Answers] = {}

    def begun(self, exchange: Exchange) -> None:
        """See `Observer`."""
        self._answers[id(exchange)] = _Answers()

    def arrived(self, exchange: Exchange, place: int, chunks: list[Chunk], seconds: float) -> None:
        """See `Observer`."""
        answers = self._answers.get(id(exchange))
        if answers is not None:
            answers.add(place, chunks)

    def finished(self, exchange: Exchange, record: UsageRecord) -> None:
        """See `Observer`."""
        answers = self._answers.pop(id(exchange), None) or _Answers()
        prompts: list[str | list[int]] = []
        room = MAX_CHARACTERS
        for prompt in exchange.prompts:
            prompts.append(prompt[: max(0, room)])
            room -= len(prompt)
        told = {
            "model": exchange.model,
            "prompts": prompts,
            "answers": [
                {str(index): "".join(texts) for (where, index), texts in answers.texts.items() if where == place}
                for place in range(len(prompts))
            ],
            "truncated": answers.room < 0 or room < 0,
        }
        text = _encode(told).decode("utf-8", "replace")
        self._log.put(Payload(exchange.started, exchange.request_id, exchange.caller.owner, text))


class _Answers:
    def __init__(self) -> None:
        self.texts: dict[tuple[int, int], list[str]] = {}
        self.room = MAX_CHARACTERS

    def add(self, place: int, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            text = chunk.text[: max(0, self.room)]
            self.room -= len(chunk.text)
            if text:
                self.texts.setdefault((place, chunk.index), []).append(text)
