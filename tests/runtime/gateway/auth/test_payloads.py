"""Prompts and answers in the usage log: their size limit, and only if requested."""

import json
from dataclasses import replace
from typing import Any

import pytest
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.auth import usage_log as payloads
from sidestream.runtime.gateway.auth.usage_log import PayloadLog
from sidestream.runtime.gateway.interfaces import AdmittedRequest, Caller, UsageRecord
from sidestream.runtime.protocol.messages import Chunk

EXCHANGE = AdmittedRequest(
    "r1", "/v1/completions", Caller("search"), "", "sql", "sql", True, ["héllo", [1, 2, 3]], SamplingParams(n=2),
    started=7.0,
)  # fmt: skip
RECORD = UsageRecord(7.0, "r1", "/v1/completions", "search", "", "llama", "sql", "aa", 10, 5, 4, 0.25, 1.5, 200)


class Kept:
    """A usage log that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def put(self, record: Any) -> None:
        self.records.append(record)


def told(exchange: AdmittedRequest) -> dict[str, Any]:
    kept = Kept()
    log = PayloadLog(kept)  # type: ignore[arg-type]
    log.on_admitted(exchange)
    for place, index, text in ((0, 0, "on"), (1, 1, "fo"), (0, 1, "two"), (0, 0, "e"), (1, 1, "ur"), (1, 0, "")):
        log.on_chunks(exchange, place, [Chunk("r1", index, 0, text, [1])], 0.1)
    log.on_finished(exchange, RECORD)
    (payload,) = kept.records
    assert (payload.time, payload.request_id, payload.owner) == (7.0, "r1", "search")
    found: dict[str, Any] = json.loads(payload.payload)
    return found


def test_each_prompt_has_its_completions() -> None:
    assert told(EXCHANGE) == {
        "model": "sql",
        "prompts": ["héllo", [1, 2, 3]],
        "answers": [{"0": "one", "1": "two"}, {"1": "four"}],
        "truncated": False,
    }


def test_what_is_too_long_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "MAX_CHARACTERS", 6)
    assert told(EXCHANGE) == {
        "model": "sql",
        "prompts": ["héllo", [1]],
        "answers": [{"0": "on", "1": "tw"}, {"1": "fo"}],
        "truncated": True,
    }


def test_a_request_without_an_answer_is_kept_too() -> None:
    kept = Kept()
    log = PayloadLog(kept)  # type: ignore[arg-type]
    log.on_admitted(EXCHANGE)
    log.on_finished(EXCHANGE, replace(RECORD, status=503, output_tokens=0))
    assert json.loads(kept.records[0].payload)["answers"] == [{}, {}]
