"""Run Haystack: chat, responses, streams, tools, structured output, a pipeline."""

from typing import Literal

from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from pydantic import BaseModel

QUESTION = "What is the capital of France?"
ASK = [ChatMessage.from_user(QUESTION)]


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


tool = create_tool_from_function(weather)
chat = OpenAIChatGenerator(model="demo_model", generation_kwargs={"temperature": 0, "max_completion_tokens": 200})
(answer,) = chat.run(ASK)["replies"]
assert "Paris" in answer.text and answer.meta["finish_reason"] == "stop"

parts: list[str] = []
(streamed,) = chat.run(ASK, streaming_callback=lambda part: parts.append(part.content))["replies"]
assert "".join(parts) == streamed.text == answer.text

(made,) = chat.run(ASK, generation_kwargs={"response_format": Capital})["replies"]
Capital.model_validate_json(made.text)

# the call, its result, the answer: over chat and over responses
responses = OpenAIResponsesChatGenerator(model="demo_model", generation_kwargs={"max_output_tokens": 200})
for generator in (chat, responses):
    (called,) = generator.run(ASK, tools=[tool], generation_kwargs={"tool_choice": "required"})["replies"]
    (call,) = called.tool_calls
    result = ChatMessage.from_tool(tool.invoke(**call.arguments), origin=call)
    (final,) = generator.run([*ASK, called, result], tools=[tool], generation_kwargs={"temperature": 0})["replies"]
    assert "Paris" in final.text, generator

pipeline = Pipeline()
pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("What is the capital of {{country}}?")]))
pipeline.add_component("model", OpenAIChatGenerator(model="pirate", generation_kwargs={"temperature": 0}))
pipeline.connect("prompt.prompt", "model.messages")
(adapted,) = pipeline.run({"prompt": {"country": "France"}})["model"]["replies"]
assert adapted.text != answer.text
