"""Run instructor: response models as a JSON schema, as a tool call and as responses, partial models."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

ASK = [{"role": "user", "content": "What is the capital of France?"}]


class Capital(BaseModel):
    """Name a capital."""

    city: Literal["Paris", "Rome"]


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(OpenAI(), mode=mode)
    responses = mode is instructor.Mode.RESPONSES_TOOLS
    limit = {"max_output_tokens": 200} if responses else {"max_tokens": 200}
    made = client.create(
        model="demo_model", messages=ASK, response_model=Capital, temperature=0, max_retries=0, **limit
    )
    assert made.city in ("Paris", "Rome"), (mode, made)

client = instructor.from_openai(OpenAI(), mode=instructor.Mode.TOOLS)
parts = client.create_partial(model="demo_model", messages=ASK, response_model=Capital, max_tokens=200)
assert list(parts)[-1].city in ("Paris", "Rome")
