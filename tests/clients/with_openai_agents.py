"""Run openai-agents: a tool loop over responses and over chat, streams, output types."""

import asyncio
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"
looked_up: list[str] = []


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]


@function_tool
def population(city: Literal["Paris", "Rome"]) -> str:
    """Return the population of a city."""
    looked_up.append(city)
    return "2 million"


async def main() -> None:
    client = AsyncOpenAI()
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="required")
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="demo_model", openai_client=client)
        # the first turn must call the tool; the library then resets tool_choice, and the model answers
        agent = Agent(name="guide", instructions="Be brief.", tools=[population], model=model, model_settings=settings)
        calls = len(looked_up)
        result = await Runner.run(agent, QUESTION)
        assert len(looked_up) == calls + 1 and "Paris" in result.final_output, result.final_output

        streamed = Runner.run_streamed(agent, QUESTION)
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds and len(looked_up) == calls + 2
        assert "Paris" in streamed.final_output, streamed.final_output

        typed = Agent(name="typed", model=model, output_type=Capital, model_settings=ModelSettings(max_tokens=200))
        assert isinstance((await Runner.run(typed, QUESTION)).final_output, Capital)

        # a second question of the same conversation: the answer's items are sent back
        history = [*result.to_input_list(), {"role": "user", "content": "What is the capital of Italy?"}]
        assert "Rome" in (await Runner.run(agent, history)).final_output


asyncio.run(main())
