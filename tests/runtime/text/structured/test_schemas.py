"""Answers of the demo model satisfy the requested schema, for every family of schemas."""

import json
from collections import Counter
from itertools import product

import jsonschema
import pytest
from sidestream import LLM, SamplingParams
from support.schemas import FAMILIES, schema

A_FAMILY = 3
A_FAMILY_AND_PART = 20
PARTS = 10
"""So many times twenty schemas of each family are 2,000, if exhaustive."""
PROMPT = "What is the capital of France?"


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", show_progress=False, speculation=3) as llm:
        yield llm


def check(llm, seeds):
    """Asks for answers by schemas of all families, every second one with drafts; those that came to their end validate,
    and nearly all do.
    """
    asked = [schema(family, seed) for family, seed in product(FAMILIES, seeds)]
    names = [family.__name__ for family, _ in product(FAMILIES, seeds)]
    params = [
        SamplingParams(
            temperature=0.8,
            seed=seed,
            max_tokens=400,
            structured_outputs={"json": each},
            speculation=("off", None)[seed % 2],
        )
        for seed, each in enumerate(asked, len(FAMILIES) * seeds.start)
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
    print(f"schemas {seeds.start} to {seeds.stop - 1} of {len(FAMILIES)} families: {len(asked)} asked for,", end=" ")
    print(f"{complete.total()} answers complete and valid, {len(asked) - complete.total()} cut at 400 tokens")
    assert all(complete[name] >= 0.8 * len(seeds) for name in set(names)), complete


def test_every_answer_validates(llm):
    check(llm, range(A_FAMILY))


@pytest.mark.parametrize("part", range(PARTS))
def test_every_answer_of_2000_validates(llm, request, part):
    if not request.config.getoption("--exhaustive"):
        pytest.skip("only with --exhaustive")
    check(llm, range(A_FAMILY_AND_PART * part, A_FAMILY_AND_PART * (part + 1)))
