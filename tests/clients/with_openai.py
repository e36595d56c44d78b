"""Run OpenAI's SDK: chat, completions, responses, parse, streams, tools."""

from typing import Literal

from openai import AuthenticationError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]


class Weather(BaseModel):
    """Return the weather of a city."""

    city: Literal["Paris", "Rome"]


client = OpenAI()
assert {"demo_model", "pirate"} <= {model.id for model in client.models.list()}
ask = [{"role": "user", "content": QUESTION}]

# chat, with an adapter and with token probabilities
chat = client.chat.completions.create(model="demo_model", messages=ask, temperature=0, logprobs=True, top_logprobs=3)
assert "Paris" in chat.choices[0].message.content and chat.choices[0].finish_reason == "stop"
assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
adapted = client.chat.completions.create(model="pirate", messages=ask, temperature=0)
assert adapted.model == "pirate" and adapted.choices[0].message.content != chat.choices[0].message.content

# a streamed chat, with the usage at its end
chunks = list(
    client.chat.completions.create(
        model="demo_model", messages=ask, temperature=0, stream=True, stream_options={"include_usage": True}
    )
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
    chat.choices[0].message.content
)
assert chunks[-1].usage == chat.usage

# completions: several prompts, streamed and not
texts = client.completions.create(model="demo_model", prompt=[QUESTION] * 2, temperature=0, max_tokens=16).choices
assert [choice.index for choice in texts] == [0, 1] and all("Paris" in choice.text for choice in texts)
parts = client.completions.create(model="demo_model", prompt=QUESTION, temperature=0, max_tokens=16, stream=True)
assert "".join(part.choices[0].text for part in parts) == texts[0].text

# parse: chat and responses
parsed = client.chat.completions.parse(model="demo_model", messages=ask, response_format=Capital, max_tokens=200)
assert isinstance(parsed.choices[0].message.parsed, Capital)
assert isinstance(
    client.responses.parse(
        model="demo_model", input=QUESTION, text_format=Capital, max_output_tokens=200
    ).output_parsed,
    Capital,
)

# tools: the call, its result, the answer; the same streamed by the SDK's accumulator
tools = [pydantic_function_tool(Weather)]
called = client.chat.completions.create(model="demo_model", messages=ask, tools=tools, tool_choice="required")
(call,) = called.choices[0].message.tool_calls
Weather.model_validate_json(call.function.arguments)
told = [*ask, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
answer = client.chat.completions.create(model="demo_model", messages=told, tools=tools, temperature=0)
assert "Paris" in answer.choices[0].message.content
with client.chat.completions.stream(model="demo_model", messages=ask, tools=tools, tool_choice="required") as stream:
    message = stream.get_final_completion().choices[0].message
assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)

# responses: text, a stream's events, a tool with its result
answer = client.responses.create(model="demo_model", input=QUESTION, temperature=0)
assert "Paris" in answer.output_text
with client.responses.stream(model="demo_model", input=QUESTION, temperature=0) as stream:
    kinds = [event.type for event in stream]
    assert stream.get_final_response().output_text == answer.output_text
assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
function = {"type": "function", "strict": True, "name": "weather", "parameters": Weather.model_json_schema()}
function["parameters"]["additionalProperties"] = False
called = client.responses.create(model="demo_model", input=ask, tools=[function], tool_choice="required")
(call,) = [item for item in called.output if item.type == "function_call"]
items = [*ask, *called.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
answer = client.responses.create(model="demo_model", input=items, tools=[function], temperature=0)
assert "Paris" in answer.output_text

try:
    OpenAI(api_key="wrong").models.list()
except AuthenticationError:
    pass
else:
    raise AssertionError("a wrong key was accepted")
