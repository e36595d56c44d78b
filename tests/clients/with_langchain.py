"""Run LangChain: chat, streams, batches, tools, structured output, completions, responses."""

from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """Name a capital."""

    city: Literal["Paris", "Rome"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


for responses in (False, True):
    chat = ChatOpenAI(model="demo_model", temperature=0, max_tokens=200, use_responses_api=responses)
    answer = chat.invoke([("system", "Be brief."), ("human", QUESTION)])
    assert "Paris" in answer.text and answer.usage_metadata["output_tokens"] > 0
    assert "".join(part.text for part in chat.stream(QUESTION)) == answer.text
    assert ["Paris" in each.text for each in chat.batch([QUESTION, "What is the capital of Italy?"])] == [True, False]

    for method in ("json_schema", "function_calling"):
        made = chat.with_structured_output(Capital, method=method).invoke(QUESTION)
        assert isinstance(made, Capital), (responses, method)

    # the call, its result, the answer
    asked = [HumanMessage(QUESTION)]
    called = chat.bind_tools([weather], tool_choice="any").invoke(asked)
    (call,) = called.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and result.content.startswith("sunny in")
    assert "Paris" in chat.bind_tools([weather]).invoke([*asked, called, result]).text

assert "Paris" in OpenAI(model="demo_model", temperature=0, max_tokens=16).invoke(QUESTION)
adapted = ChatOpenAI(model="pirate", temperature=0).invoke(QUESTION)
assert adapted.response_metadata["model_name"] == "pirate"
