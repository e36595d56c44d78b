"""Expensive schemas, regular expressions and grammars: each gets an answer or an error, and other streams continue."""

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from support.hostile_constraints import FAMILIES, hostile

ENTRIES = json.loads((DEMO_MODEL / "prompts.json").read_text())
AT_ONCE = 4
EVERY = 5
ALL = 500


async def asked(http: httpx.AsyncClient, number: int) -> int:
    """The status of a hostile request's answer."""
    body = {"prompt": "x", "max_tokens": 24, "structured_outputs": hostile(number)}
    answer = await http.post("/v1/completions", json=body)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert answer.status_code == 400 and len(error["message"]) < 1000, error
    return answer.status_code


async def healthy(http: httpx.AsyncClient, entry: dict[str, Any]) -> None:
    """One stream, exactly as it should be."""
    model = entry["adapter"] or "demo_model"
    body = {"model": model, "prompt": entry["prompt"], "temperature": 0, "max_tokens": 48, "stream": True}
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as lines:
        async for line in lines.aiter_lines():
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert text.strip() == entry["answer"]


def test_nobody_is_hurt(served: Any, request: pytest.FixtureRequest) -> None:
    exhaustive = request.config.getoption("--exhaustive")
    numbers = list(range(ALL) if exhaustive else range(0, len(FAMILIES), EVERY))

    async def scene() -> None:
        waiting, statuses, streams = list(numbers), [], 0

        async def attack() -> None:
            while waiting:
                statuses.append(await asked(http, waiting.pop()))

        async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
            attacks = [asyncio.create_task(attack()) for _ in range(AT_ONCE)]
            while not all(task.done() for task in attacks):
                await healthy(http, ENTRIES[streams % len(ENTRIES)])
                streams += 1
            await asyncio.gather(*attacks)
            assert (await http.get("/health")).status_code == 200
        told = ", ".join(f"{count} answered with {status}" for status, count in sorted(Counter(statuses).items()))
        print(f"{len(statuses)} hostile constraints: {told}; {streams} streams next to them were exact")
        assert len(statuses) == len(numbers) and streams > 0
        assert 400 in statuses, "some are hopeless"

    asyncio.run(scene())
