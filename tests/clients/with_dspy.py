"""Run DSPy: calls of the model, typed predictions with a JSON schema, a batch, streams."""

import asyncio
import os
from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider


class Capital(dspy.Signature):
    """Answer the question."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Rome"] = dspy.OutputField()


QUESTION = "What is the capital of France?"
server = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
access = AccessPolicy(provider="sidestream", env_keys=("OPENAI_API_KEY",), base_url=server["api_base"])
register_provider(
    ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("vllm")), supports=ModelSupport(response_schema=True)
)

model = dspy.LM("sidestream/demo_model", temperature=0, max_tokens=200, cache=False, **server)
assert "Paris" in str(model(QUESTION))
assert str(dspy.LM("openai/pirate", temperature=0, cache=False, **server)(QUESTION)) != str(model(QUESTION))

dspy.configure(lm=model, adapter=dspy.JSONAdapter())
predict = dspy.Predict(Capital)
assert predict(question=QUESTION).city in ("Paris", "Rome")
many = predict.batch([dspy.Example(question=QUESTION).with_inputs("question")] * 2, disable_progress_bar=True)
assert len(many) == 2 and all(each.city in ("Paris", "Rome") for each in many)


async def stream() -> None:
    parts = [part async for part in dspy.streamify(predict)(question=QUESTION)]
    assert isinstance(parts[-1], dspy.Prediction) and parts[-1].city in ("Paris", "Rome")


asyncio.run(stream())
