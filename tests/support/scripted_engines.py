"""Engines that answer a prompt with a text of the test's choice, and a chat template with tools and reasoning."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.protocol.messages import Chunk, Usage
from sidestream.runtime.text.chat_files import ChatTemplates

from .gateway import FakeEngines

TEMPLATE = """\
{%- if tools %}[tools{% for tool in tools %} {{ tool.function.name }}{% endfor %} <tool_call>]{% endif %}
{%- for message in messages %}
    {{- "<" + message.role + ">" }}
    {%- if message.reasoning_content %}{{ "<think>" + message.reasoning_content + "</think>" }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
    {%- if message.role == "tool" %}{{ "=" + message.name }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"""


class ScriptedEngines(FakeEngines):
    """Sends `answer(prompt)` in tokens of `size` characters, as far as `max_tokens` and the model's length allow.

    cached   tokens of each prompt that are said to come from the prefix cache
    stop     the stop reason of answers that end by themselves
    """

    def __init__(self, answer: Callable[[str], str], size: int = 5) -> None:
        super().__init__()
        self._answer, self._size = answer, size
        self.cached = 0
        self.stop: str | None = None
        self.info = replace(self.info, templates=ChatTemplates({"default": TEMPLATE}))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        self.asked.append(request)
        prompt = str(request.prompt)
        if request.when_accepted is not None:
            request.when_accepted(len(prompt), "")
        text, size, limit = self._answer(prompt), self._size, self.info.max_model_len - len(prompt)
        limit = min(limit, request.params.max_tokens or limit)
        pieces = [text[start : start + size] for start in range(0, len(text), size)] or [""]
        reason = "stop" if len(pieces) <= limit else "length"
        pieces = pieces[:limit]
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            usage = Usage(len(prompt), len(pieces), self.cached) if last else None
            stop = self.stop if last and reason == "stop" else None
            chunk = Chunk(request.request_id, 0, index, piece, [index], reason if last else None, stop, None, usage)
            if not self._taken(request, chunk):
                yield [chunk]
            await asyncio.sleep(0)
