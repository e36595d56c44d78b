"""What the demo model says fits the schema that was asked for, whatever family the schema is of."""

import json
from collections import Counter
from itertools import product

import jsonschema
import pytest
from sidestream import LLM, SamplingParams
from support.schemas import FAMILIES, schema

A_FAMILY = 3
A_FAMILY_IF_EXHAUSTIVE = 200
PROMPT = "What is the capital of France?"


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", show_progress=False) as llm:
        yield llm


def test_every_answer_validates(llm, request):
    count = A_FAMILY_IF_EXHAUSTIVE if request.config.getoption("--exhaustive") else A_FAMILY
    asked = [schema(family, seed) for family, seed in product(FAMILIES, range(count))]
    names = [family.__name__ for family, _ in product(FAMILIES, range(count))]
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=400, structured_outputs={"json": each})
        for seed, each in enumerate(asked)
    ]
    adapters = [(None, *llm.adapters)[seed % 3] for seed in range(len(asked))]
    outputs = llm.generate([PROMPT] * len(asked), params, adapter=adapters, use_tqdm=False)
    complete: Counter[str] = Counter()
    for name, each, output in zip(names, asked, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason in ("stop", "length"), (each, answer.stop_reason)
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), each, format_checker=jsonschema.FormatChecker())
            complete[name] += 1
    assert all(complete[name] >= 0.9 * count for name in set(names)), complete
