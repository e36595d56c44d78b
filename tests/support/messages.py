"""Bodies for /v1/messages, engines that answer them, and the message of a stream."""

import json
from typing import Any

from .scripted import ScriptedEngines

ASK: dict[str, Any] = {"model": "pirate", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": "get", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
TEMPLATE = """\
{%- if tools %}[tools{% for tool in tools %} {{ tool.function.name }}{% endfor %} <tool_call>]{% endif %}
{%- for message in messages %}
    {{- "<" + message.role + ">" }}
    {%- if message.reasoning_content %}{{ "<think>" + message.reasoning_content + "</think>" }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name }}{{ call.function.arguments | tojson }}
    {%- endfor %}
    {%- if message.role == "tool" %}{{ "=" + message.name }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"""
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'


def answering(text: str, size: int = 5) -> ScriptedEngines:
    """Engines that send a text in tokens of `size` characters."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return ScriptedEngines(pieces or [""], template=TEMPLATE)


def replay(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream describe, as a client puts it together."""
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    for event in stream:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"]) and len(texts) == event["index"], (
                "one open block at a time"
            )
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            delta = event["delta"]
            text = delta.get("text", delta.get("partial_json", delta.get("thinking")))
            texts[event["index"]] = texts.get(event["index"], "") + text
        elif kind == "content_block_stop":
            block, text = message["content"][event["index"]], texts.setdefault(event["index"], "")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
            else:
                block[block["type"]] = text
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = message["usage"] | event["usage"]
    assert stream[-1]["type"] == "message_stop"
    return message
