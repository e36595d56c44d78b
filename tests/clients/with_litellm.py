"""Run LiteLLM: chat, completions, responses, messages, streams, tools, structured output."""

import asyncio
import os
from typing import Literal

import litellm
from pydantic import BaseModel

ASK = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = {"model": "openai/demo_model", "temperature": 0}


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": Capital.model_json_schema()}}

answer = litellm.completion(**MODEL, messages=ASK)
assert "Paris" in answer.choices[0].message.content and answer.usage.completion_tokens > 0
parts = list(litellm.completion(**MODEL, messages=ASK, stream=True))
streamed = litellm.stream_chunk_builder(parts, messages=ASK)
assert streamed.choices[0].message.content == answer.choices[0].message.content

made = litellm.completion(**MODEL, messages=ASK, response_format=Capital, max_tokens=200)
Capital.model_validate_json(made.choices[0].message.content)

# the call, its result, the answer; LiteLLM sends its whole message back
called = litellm.completion(**MODEL, messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=200)
message = called.choices[0].message
(call,) = message.tool_calls
Capital.model_validate_json(call.function.arguments)
history = [*ASK, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
assert "Paris" in litellm.completion(**MODEL, messages=history, tools=[TOOL]).choices[0].message.content

# the same server as vLLM
vllm = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
hosted = litellm.completion(model="hosted_vllm/pirate", messages=ASK, temperature=0, **vllm)
assert hosted.choices[0].message.content != answer.choices[0].message.content

text = litellm.text_completion(model="text-completion-openai/demo_model", prompt=ASK[0]["content"], temperature=0)
assert "Paris" in text.choices[0].text

said = litellm.responses(**MODEL, input=ASK[0]["content"])
assert "Paris" in said.output[-1].content[0].text

# Anthropic's API in front, this server's chat behind
posted = asyncio.run(litellm.anthropic.messages.acreate(**MODEL, messages=ASK, max_tokens=64))
assert "Paris" in posted["content"][0]["text"]
