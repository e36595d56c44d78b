"""Drafts with an injected acceptance are right as often as asked, and the bench's figures follow from that."""

import json
from pathlib import Path

import pytest
import torch
from sidestream.ops.spec_decode.draft_ngram import LONGEST
from sidestream.runtime.text.structured import draft_masks as drafted
from sidestream.tools import cli
from sidestream.tools.bench import latency
from sidestream.tools.bench.injected_drafts import InjectedDrafts

VOCABULARY = 50


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.75, 1.0])
def test_drafts_are_right_as_often_as_asked(acceptance: float) -> None:
    recorded = torch.randint(0, VOCABULARY, (4, 900))
    injected = InjectedDrafts(recorded.tolist(), acceptance, VOCABULARY, 16, torch.device("cpu"))
    order = [2, 0, 3]
    history = recorded[order].to(torch.int32)
    right = []
    for length in range(20, 880, 3):
        lengths, rows = torch.full((3,), length, dtype=torch.int32), torch.tensor([1, -1, 2], dtype=torch.int32)
        drafts, agreed = injected.draft(history, lengths, rows, 3)
        assert torch.equal(drafts, injected.draft(history, lengths, rows, 3)[0]) and drafts.dtype == torch.int32
        assert (agreed == LONGEST).all(), "former answers know no better"
        right.append(drafts[[0, 2]] == recorded[[order[1], order[2]], length : length + 3])
    assert torch.stack(right).float().mean() == pytest.approx(acceptance, abs=0.04)


def test_answers_are_the_recorded_ones_whatever_is_sampled() -> None:
    recorded = torch.randint(0, VOCABULARY, (2, 40), dtype=torch.int32)
    injected = InjectedDrafts(recorded.tolist(), 0.5, VOCABULARY, 16, torch.device("cpu"))
    history, lengths = recorded[[1, 0, 1]].clone(), torch.tensor([20, 30, 25], dtype=torch.int32)
    history[:, 32:] = -1
    rows, counts = torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([3, 0, 1], dtype=torch.int32)
    drafts = recorded[1, None, 25:28].repeat(3, 1)
    drafts[0, 2] += 1
    drafts[2, 0] = recorded[1, 20]
    tokens = torch.randint(0, VOCABULARY, (7,), dtype=torch.int32)
    sampled, first = tokens.clone(), torch.tensor([0, 4, 5], dtype=torch.int32)
    assert injected.hold(tokens, drafts, rows, counts, first, history, lengths).tolist() == [2, 0, 1]
    assert torch.equal(tokens[[0, 1, 2, 3, 5, 6]], recorded[1, [25, 26, 27, 28, 20, 21]]) and tokens[4] == sampled[4]
    assert lengths.tolist() == [22, 30, 28] and torch.equal(history[2, :28], recorded[1, :28])


def test_bench_latency_with_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Milliseconds for an output token, whatever this machine takes."""
    took = iter([2.0, 3.0, 1.25, 2.0, 2.0, 2.0])
    monkeypatch.setattr(latency, "measure", lambda generate, output_len, repeats: (next(took), 0.0, 1.0))
    target = tmp_path / "latency.json"
    command = ["bench", "latency", "demo", "--device", "cpu", "--concurrency", "1", "--lora", "none"]
    sizes = ["--input-len", "9", "--output-len", "44", "--num-iters", "1", "--output-json", str(target)]
    monkeypatch.setattr(drafted, "DRAFT_SECONDS", 60.0)
    assert cli.main([*command, *sizes, "--speculate", "3", "--acceptance", "1", "--structured"]) == 0
    plain, constrained, always, both = json.loads(target.read_text())["rows"]
    assert constrained["structured"] and both["structured"] and both["injected_acceptance"] == 1.0
    assert (constrained["tokens_per_step"], both["tokens_per_step"]) == (1.0, 4.0)
    assert (plain["drafts"], plain["injected_acceptance"], plain["tokens_per_step"]) == (0, None, 1.0)
    assert (always["drafts"], always["injected_acceptance"]) == (3, 1.0) and always["tokens_per_step"] == 4.0
    assert (plain["ms_per_step"], always["ms_per_step"]) == (2.0, 5.0)
    assert always["drafts_per_step"] == 3.0
    shown = capsys.readouterr().out
    assert "none@1 " in shown and "injected probability" in shown
    assert [line.split()[-1] for line in shown.splitlines() if "@1 " in line] == ["1.60", "1.50"]

    chosen = ["--speculate", "auto", "--acceptance", "0"]
    assert cli.main([*command, *sizes, *chosen]) == 0
    _, never = json.loads(target.read_text())["rows"]
    assert (never["drafts"], never["tokens_per_step"]) == ("auto", 1.0) and never["drafts_per_step"] < 1.0
    assert "as many drafts as the engine chooses" in capsys.readouterr().out


def test_what_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--speculate", "8"], ["--speculate", "2", "--acceptance", "1.5"]):
        with pytest.raises(SystemExit):
            cli.main(["bench", "latency", *wrong])
        assert "from " in capsys.readouterr().err
