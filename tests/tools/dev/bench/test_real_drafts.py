"""The bench of real drafts: its questions are held out, its table adds up, and its comparison finds what differs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sidestream.runtime.api.outputs import CompletionOutput, Logprob, RequestOutput
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.tools.dev.bench.drafts import real
from sidestream.tools.dev.bench.drafts.answers import first_difference, gaps
from sidestream.tools.dev.bench.drafts.questions import questions
from sidestream.tools.dev.eval30m.tasks import is_test


def test_the_table_of_the_demo_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter, so that few programs are built."""
    adapters = {name: path for name, path in real.demo_adapters().items() if name == "json"}
    monkeypatch.setattr(real, "demo_adapters", lambda: adapters)
    monkeypatch.setattr(real, "WARM_UP", 1)
    target = tmp_path / "found.json"
    few = ["--questions", "3", "--max-tokens", "20", "--drafts", "3", "--concurrency", "1", "--device", "cpu"]
    assert real.main(["--arms", "history", *few, "--output-json", str(target)]) == 0
    shown = capsys.readouterr().out
    rows = {(row["arm"], row["label"]): row for row in json.loads(target.read_text())["rows"]}
    assert [label for arm, label in rows if arm == "history"] == ["base/facts", "json/facts", "all"]
    plain, drafted = rows["off", "json/facts"]["counts"], rows["history", "json/facts"]["counts"]
    assert plain["drafted"] == 0 and 0 < drafted["history_accepted"] <= drafted["accepted"] < drafted["drafted"]
    assert plain["tokens"] == drafted["tokens"] and drafted["different"] == 0, "a draft changes no token"
    steps = drafted["tokens"] - drafted["accepted"]
    assert rows["history", "json/facts"]["tokens_per_step"] == pytest.approx(drafted["tokens"] / steps)
    both = [rows["history", label]["counts"] for label in ("base/facts", "json/facts")]
    assert rows["history", "all"]["counts"]["accepted"] == sum(each["accepted"] for each in both)
    assert "history, 3 drafts, 1 at once" in shown and "0/3" in shown


def test_questions_are_those_that_no_adapter_was_trained_on() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    loads = questions(Path(__file__).parent, Letters(), ["strings", "json"], 3)
    assert [load.label for load in loads] == ["base/sources", "strings", "base/strings", "json", "base/json"]
    assert all(len(load.prompts) == 3 for load in loads)
    for load in loads[1:]:
        for prompt in load.prompts:
            assert is_test(prompt if load.adapter else prompt.partition("\n")[2])
    with pytest.raises(ValueError, match="--prompts FILE"):
        questions(Path(__file__).parent, Letters(), ["poetry"], 3)


def test_a_difference_is_found_and_measured() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None and first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([1, 9, 3], [1, 2]) == 1
    seen = {7: Logprob(-0.7, 1), 8: Logprob(-0.75, 2)}

    class Seen:
        options = SimpleNamespace(speculation="off")

        def generate(self, prompts: list[Any], *_: Any, **__: Any) -> list[RequestOutput]:
            assert prompts == [{"prompt_token_ids": [1, 2, 5]}] * 2, "where the answers still agree"
            return [RequestOutput("", None, [], [CompletionOutput(0, logprobs=[seen])], True)] * 2

    one, other, far = (
        RequestOutput("", None, [1, 2], [CompletionOutput(0, "", [5, token, 3])], True) for token in (7, 8, 9)
    )
    found = gaps(Seen(), [one, one, one], [one, other, far])
    assert found == [pytest.approx(0.05), None]
    assert real.nearness(found) == ", at most 0.050 nats apart, 1 of them beyond the 20 likeliest"


def test_what_cannot_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert real.main([str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert real.main([str(DEMO_MODEL), "--adapters", str(tmp_path)]) == 2
    assert "holds no adapter" in capsys.readouterr().err
