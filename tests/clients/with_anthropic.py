"""Run Anthropic's SDK: messages, streams, tools, count_tokens."""

import anthropic

# this release of the SDK has no keyword for the temperature
ASK = {
    "model": "demo_model",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "extra_body": {"temperature": 0},
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Return the weather of a city.", "input_schema": CITY}]

client = anthropic.Anthropic()

# a message, with what the SDK's users send beside it
brief = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
answer = client.messages.create(**ASK, system=brief, metadata={"user_id": "42"})
assert "Paris" in answer.content[0].text and answer.stop_reason == "end_turn"
assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0
adapted = client.messages.create(**ASK | {"model": "pirate"})
assert adapted.model == "pirate" and adapted.content[0].text != answer.content[0].text

# stop sequences and the limit
stopped = client.messages.create(**ASK, stop_sequences=["Paris"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
assert client.messages.create(**ASK | {"max_tokens": 2}).stop_reason == "max_tokens"

# a stream: its text, and the message that the SDK accumulates
with client.messages.stream(**ASK) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text == answer.content[0].text and final.usage.output_tokens > 0

# tools: the call, its result, the answer
called = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "any"})
(use,) = [block for block in called.content if block.type == "tool_use"]
assert called.stop_reason == "tool_use" and use.name == "weather" and use.input["city"] in ("Paris", "Rome")
result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
turns = [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
answered = client.messages.create(**ASK | {"messages": ASK["messages"] + turns}, tools=TOOLS)
assert "Paris" in answered.content[0].text

# the call streamed
with client.messages.stream(**ASK, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}) as stream:
    kinds = {event.type for event in stream}
    (use,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
assert {"content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds
assert use.input["city"] in ("Paris", "Rome")

counted = client.messages.count_tokens(model="demo_model", messages=ASK["messages"])
assert counted.input_tokens == answer.usage.input_tokens
