"""Run Pydantic AI: a tool loop over chat and over responses, streams, output types."""

import asyncio
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """Name a capital."""

    city: Literal["Paris", "Rome"]


async def main() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("demo_model")
        plain = Agent(model, instructions="Be brief.", model_settings={"temperature": 0, "max_tokens": 200})
        first = await plain.run(QUESTION)
        assert "Paris" in first.output, first.output
        second = await plain.run("What is the capital of Italy?", message_history=first.all_messages())
        assert "Rome" in second.output, second.output

        async with plain.run_stream(QUESTION) as stream:
            assert "".join([text async for text in stream.stream_text(delta=True)]).strip() == first.output.strip()

        # an output type as a forced tool call, and as a JSON schema
        for output in (ToolOutput(Capital), NativeOutput(Capital)):
            typed = Agent(model, output_type=output, model_settings={"max_tokens": 200})
            assert isinstance((await typed.run(QUESTION)).output, Capital)

        # a tool next to the output type: each turn must call one of both
        agent = Agent(model, output_type=[Capital, str], model_settings={"temperature": 0, "max_tokens": 200})

        @agent.tool_plain
        def population(city: Literal["Paris", "Rome"]) -> str:
            """Return the population of a city."""
            return "2 million"

        assert (await agent.run(QUESTION)).output


asyncio.run(main())
