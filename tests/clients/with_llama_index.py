"""Run LlamaIndex: chat, completions, streams, tools, structured prediction."""

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

QUESTION = "What is the capital of France?"
SERVER = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}


class Capital(BaseModel):
    """Name a capital."""

    city: Literal["Paris", "Rome"]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


model = OpenAILike(
    "demo_model", temperature=0, max_tokens=200, is_chat_model=True, is_function_calling_model=True, **SERVER
)
ask = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]
answer = model.chat(ask).message.content
assert "Paris" in answer
assert "".join(part.delta or "" for part in model.stream_chat(ask)) == answer
assert "Paris" in model.complete(QUESTION).text

completions = OpenAILike("pirate", temperature=0, max_tokens=16, is_chat_model=False, **SERVER)
assert completions.complete(QUESTION).text
assert "".join(part.delta for part in completions.stream_complete(QUESTION))

# the call, its result, the answer
tool = FunctionTool.from_defaults(weather)
called = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
(call,) = model.get_tool_calls_from_response(called)
assert call.tool_kwargs["city"] in ("Paris", "Rome")
result = ChatMessage(role="tool", content=weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id})
history = [ChatMessage(role="user", content=QUESTION), called.message, result]
assert "Paris" in model.chat_with_tools([tool], chat_history=history).message.content

assert isinstance(model.structured_predict(Capital, PromptTemplate(QUESTION)), Capital)
