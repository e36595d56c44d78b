"""Parts of `sidestream eval`: documents and questions, steps, figures, and processes of arms."""

import math
import random
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from sidestream.graphs.config import LlamaConfig
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.worker.calibrate.scorer import Document, Scorer, plan
from sidestream.tools.cli import main
from sidestream.tools.eval import evaluate, processes
from sidestream.tools.eval.arms import ARMS, BY_NAME, chosen_arms, open_arm
from sidestream.tools.eval.divergence import divergences
from sidestream.tools.eval.processes import visible_gpus
from sidestream.tools.eval.suite import Limits, Suite, file_suite
from sidestream.tools.eval.teacher_forced import DRAWN, Compared

LIMITS = Limits(tasks=100, documents=100, longest=512)


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_every_token_is_read_once_on_pages_that_no_other_text_of_the_step_has() -> None:
    dice = random.Random(3)
    lengths = [dice.choice((1, 5, 63, 64, 65, 200, 700)) for _ in range(60)]
    read = [0] * len(lengths)
    pages = 2 * -(-700 // PAGE_SIZE) + 256 // PAGE_SIZE + 16 + 1
    for step in plan(lengths, tokens=256, sequences=16, pages=pages):
        assert sum(piece.count for piece in step) <= 256 and len(step) <= 16
        used: list[int] = []
        for piece in step:
            assert piece.start == read[piece.document]
            read[piece.document] += piece.count
            used += range(piece.first_page, piece.first_page + -(-lengths[piece.document] // PAGE_SIZE))
        assert len(set(used)) == len(used) and max(used) < pages
    assert read == lengths


def test_logits_do_not_depend_on_how_texts_are_cut_into_steps() -> None:
    config = LlamaConfig.from_directory(DEMO_MODEL)
    torch.manual_seed(5)
    asked = ((90, None), (7, "yoda"), (130, "yoda"), (40, None))
    documents = [
        Document(torch.randint(2, config.vocab_size, (length,)).tolist(), adapter) for length, adapter in asked
    ]
    llm = open_arm(
        BY_NAME["bf16"],
        DEMO_MODEL,
        {"yoda": DEMO_MODEL / "adapters/yoda"},
        device="cpu",
        num_kv_pages=24,
        max_model_len=256,
    )
    lengths = [len(document.tokens) for document in documents]
    found = []
    for tokens in (32, 288):
        scorer, rows = (
            Scorer(llm.model, tokens, 4, 24, 3),
            [torch.empty(length, config.vocab_size) for length in lengths],
        )
        for step in plan(lengths, tokens, 4, 24):
            parts = scorer.logits(step, documents).float().split([piece.count for piece in step])
            for piece, part in zip(step, parts, strict=True):
                rows[piece.document][piece.start : piece.start + piece.count] = part
        found.append(torch.cat(rows))
    assert (
        torch.allclose(found[0], found[1], atol=0.25)
        and (found[0] - found[1]).square().mean() < 1e-4 * found[0].square().mean()
    )


def test_a_prompts_file_asks_everybody_unless_it_names_an_adapter(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('plain words\n\n{"prompt": "2 + 2", "answer": "4", "adapter": "sums"}\n')
    found = file_suite(path, LIMITS, encode, ["sums", "other"])
    assert [(question.adapter, question.answer) for question in found.questions] == [
        (None, None),
        ("sums", None),
        ("other", None),
        ("sums", "4"),
    ]
    assert found.documents[-1].tokens == encode("2 + 2 4")


@pytest.mark.parametrize(("line", "named"), [
    ('{"prompt": ""}', "line 1"),
    ('{"prompt"', "not JSON"),
    ('{"prompt": "a", "adapter": "b"}', "'b' is not loaded"),
    ("", "no prompts"),
])  # fmt: skip
def test_a_prompts_file_says_what_is_wrong(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=named):
        file_suite(path, LIMITS, encode, ["sums"])


def test_figures_are_those_of_each_adapter() -> None:
    torch.manual_seed(1)
    documents = [Document(range(10), adapter) for adapter in (None, "a", None, "a")]
    kl = torch.rand(40)
    owner = torch.arange(40) // 10
    nll = torch.rand(40)
    found = {
        each.adapter: each
        for each in divergences(Compared(kl, owner == 1, nll, nll, owner, torch.zeros_like(owner)), documents)
    }
    assert found["base"].mean_kl[0] == pytest.approx(float(kl[(owner % 2) == 0].mean()), rel=1e-6)
    assert found["a"].top_1[0] == pytest.approx(0.5) and found["base"].top_1[0] == 0.0
    assert found["a"].perplexity_ratio[0] == pytest.approx(1.0)
    assert found["a"].mean_kl[1] < found["a"].mean_kl[0] < found["a"].mean_kl[2]


def test_drawn_tokens_do_not_count() -> None:
    torch.manual_seed(1)
    kl, kind = torch.rand(30), torch.arange(30) % 3
    nll = torch.rand(30)
    owner = torch.arange(30) // 15
    (found,) = divergences(Compared(kl, kind != DRAWN, nll, nll + 0.1, owner, kind), [Document(range(15))] * 2)
    assert (found.tokens, found.top_1[0]) == (20, 1.0)
    assert found.mean_kl[0] == pytest.approx(float(kl[kind != DRAWN].mean()), rel=1e-6)
    assert found.perplexity_ratio[0] == pytest.approx(math.exp(0.1), rel=1e-5)


def test_an_arm_that_breaks_its_process_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        """Breaks for the arm fp8, and for every later arm."""

        broken = False

        def __init__(self, *_args: object) -> None: ...

        def submit(self, _function: object, name: str) -> "Future[evaluate.Run]":
            self.broken = self.broken or name == "fp8"
            future: Future[evaluate.Run] = Future()
            if self.broken:
                future.set_exception(BrokenProcessPool("gone"))
            else:
                future.set_result(evaluate.Run([], [], 1.0))
            return future

        def shutdown(self) -> None: ...

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Pool)
    model, arms = evaluate.Model(Path(), {}), chosen_arms(["int8", "fp8", "peer-int8"])
    found = evaluate.evaluate(model, Suite(""), arms, None, lambda stage: None, 2)
    assert [result.arm for result in found.results] == ["int8", "peer-int8"]
    assert found.errors == {"fp8": "its process ended: gone"}


def test_arms_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert [arm.name for arm in chosen_arms(["fp8", "bf16-unfused"])] == ["bf16-unfused", "fp8"]
    assert chosen_arms([]) == list(ARMS)
    assert main(["eval", "--list-arms"]) == 0
    listed = capsys.readouterr().out
    assert all(arm.name in listed for arm in ARMS)
    assert main(["eval", "--arms", "fp7"]) == 2
    assert "'fp7', which is not an arm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chosen", "count", "dealt"),
    [
        (None, 2, ["0", "1", "0"]),
        ("3", 1, ["3", "3", "3"]),
        ("2,0,1", 3, ["2", "0", "1"]),
        (None, 0, ["", "", ""]),
        ("", 0, ["", "", ""]),
    ],
)
def test_processes_take_turns_on_the_gpus(chosen: str | None, count: int, dealt: list[str]) -> None:
    gpus = visible_gpus(chosen, count)
    assert [next(gpus) for _ in range(3)] == dealt
