"""Parts of `sidestream eval`: what is read and asked, how steps are packed, and when a claim may be made."""

import json
import math
import random
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sidestream.graphs.config import LlamaConfig
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.worker.calibrate.reader import Document, Scorer, plan
from sidestream.tools.cli import main
from sidestream.tools.quality import emulation, suite
from sidestream.tools.quality.arms import ARMS, BY_NAME, chosen_arms, open_arm
from sidestream.tools.quality.divergence import Divergence, divergences
from sidestream.tools.quality.evaluate import Round, visible_gpus
from sidestream.tools.quality.exact import accuracies, needles
from sidestream.tools.quality.report import tables, verdicts
from sidestream.tools.quality.suite import Limits, Question, Suite, by_text, file_suite
from sidestream.tools.quality.teacher_forced import ANSWER, DRAWN, TEXT, Compared
from sidestream.tools.quality.verdict import ArmResult, conditions

LIMITS = Limits(tasks=100, documents=100, needles=0, longest=512)


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


def good() -> ArmResult:
    """An arm at the edge of every condition."""
    questions = [Question((), "x", 1, "sums") for _ in range(4000)]
    result = ArmResult("fp8", "")
    result.divergences = [
        Divergence("sums", 400, 200_000, (0.004, 0.003, 0.005), (0.1, 0.1, 0.1), (0.97, 0.96, 0.98), (1.005, 1.0, 1.01))
    ]
    result.accuracies, result.pooled = accuracies(questions, ["x"] * 4000, ["y", "y", *["x"] * 3998])
    result.needles = needles([Question((), "x", 1, "sums", (1024, 0.5))] * 50, ["x"] * 50, ["y", *["x"] * 49])
    return result


def again(flips: int) -> ArmResult:
    result = ArmResult("bf16 again", "")
    answers = [*["y"] * flips, *["x"] * (4000 - flips)]
    result.accuracies, result.pooled = accuracies(
        [Question((), "x", 1, "sums") for _ in range(4000)], ["x"] * 4000, answers
    )
    return result


def judged(result: ArmResult, flips: int = 1) -> ArmResult:
    result.conditions = conditions(result, again(flips).pooled)
    return result


def test_the_claim_is_made_at_the_edge_of_every_condition_and_never_beyond() -> None:
    assert judged(good()).identical
    assert judged(good(), flips=0).verdict == "gap"
    other = replace(good().divergences[0], adapter="other")
    top_1, ratio = replace(other, top_1=(0.9699, 0.9, 0.99)), replace(other, perplexity_ratio=(1.0051, 1.0, 1.01))
    for worse in (replace(other, mean_kl=(0.004, 0.003, 0.0051)), top_1, ratio):
        result = good()
        result.divergences = [*result.divergences, worse]
        judged(result)
        assert not result.identical and result.failed
        assert verdicts(Round("clean", again(1), [result])).count("(other)") == 1
    result = good()
    result.needles = needles([Question((), "x", 1, "sums", (1024, 0.5))] * 50, ["x"] * 50, ["y", "y", *["x"] * 48])
    assert judged(result).failed


@pytest.mark.parametrize("missing", ["divergences", "accuracies", "needles"])
def test_what_was_not_measured_or_asked_too_little_is_no_claim(missing: str) -> None:
    result = good()
    setattr(result, missing, [])
    assert not judged(result).identical and not result.failed
    few = good()
    few.divergences = [replace(few.divergences[0], tokens=199_999)]
    assert judged(few).verdict == "not decided"


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


def test_what_was_drawn_does_not_count_and_is_shown_apart() -> None:
    torch.manual_seed(1)
    kl, kind = torch.rand(30), torch.arange(30) % 3
    nll = torch.rand(30)
    owner = torch.arange(30) // 15
    (found,) = divergences(Compared(kl, kind != DRAWN, nll, nll + 0.1, owner, kind), [Document(range(15))] * 2)
    assert (found.tokens, found.top_1[0]) == (20, 1.0) and found.mean_kl[0] == pytest.approx(
        float(kl[kind != DRAWN].mean()), rel=1e-6
    )
    assert {name: share.tokens for name, share in found.shares.items()} == {
        "text": 10,
        "answers": 10,
        "drawn": 10,
        "all": 30,
    }
    assert (found.shares["drawn"].top_1, found.shares["answers"].top_1) == (0.0, 1.0) and found.shares[
        "all"
    ].top_1 == pytest.approx(2 / 3)
    assert found.shares["drawn"].mean_kl == pytest.approx(float(kl[kind == DRAWN].mean()), rel=1e-6)
    assert found.shares["all"].perplexity_ratio == pytest.approx(math.exp(0.1), rel=1e-5)
    result = judged(good())
    result.divergences = [replace(result.divergences[0], shares=found.shares)]
    shown = {condition.name: condition.figure for condition in judged(result).conditions}
    assert shown["top-1 agreement"] == "97.00% (sums); over all tokens read 66.67% (sums)", (
        "the other figure is never left out"
    )
    text = "\n".join(table.text() for table in tables(Round("clean", again(1), [result])))
    assert "66.67%" in text and "Teacher-forced by what is to be predicted" in text


def test_a_questions_drawn_tokens_are_marked_where_they_are_predicted() -> None:
    read = Question([0, 5, 6, 7], "x", 4, "sums").document([8, 9])
    assert (list(read.tokens), list(read.kinds)) == ([0, 5, 6, 7, 8, 9], [DRAWN] * 3 + [ANSWER] * 3)
    read = Question([0, 5, 6, 7], "x", 4, "sums", plain=bytes([1, 1, 0, 0])).document([8])
    assert list(read.kinds) == [TEXT, DRAWN, DRAWN, ANSWER, ANSWER]


def test_an_answer_follows_its_question_without_a_new_beginning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Letters:
        """Begins every text with token 0."""

        def encode(self, text: str) -> list[int]:
            return [0, *encode(text)]

    monkeypatch.setattr(suite, "WORKER_SETTINGS", {"directory": tmp_path, "tokenizer": Letters()})
    assert list(suite._answer_tokens(tmp_path, Question([0, 5], "ab", 4))) == encode(" ab")


def test_needles_of_one_text_are_asked_one_after_the_other() -> None:
    needles_of = [
        Question([text] * 100 + [depth], "x", 1, "retrieval", (1024, depth / 4))
        for depth in range(5)
        for text in range(7)
    ]
    order = by_text(needles_of, 3)
    assert sorted(order) == list(range(35)) and order != by_text(needles_of, 4)
    assert [needles_of[place].tokens[0] for place in order] == [
        needles_of[place].tokens[0] for place in order[::5] for _ in range(5)
    ]


def test_few_needles_decide_nothing() -> None:
    asked = [Question((), "x", 1, "sums", (1024, 0.5))] * 20
    for answers, state in (
        (["x"] * 20, "undecided"),
        (["y", *["x"] * 19], "undecided"),
        (["y"] * 5 + ["x"] * 15, "missed"),
    ):
        result = good()
        result.needles = needles(asked, ["x"] * 20, answers)
        found = next(condition for condition in judged(result).conditions if condition.name == "needle")
        assert found.state == state and f"of all 20 {answers.count('y')} lost, 0 won" in found.figure


def test_an_arm_that_breaks_its_process_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures.process import BrokenProcessPool

    from sidestream.tools.quality import evaluate

    class Pool:
        """Breaks for the arm fp8, and for everything that it is asked afterwards."""

        broken = False

        def __init__(self, *_args: object) -> None: ...

        def submit(self, _function: object, name: str) -> "Future[evaluate.Raw]":
            self.broken = self.broken or name == "fp8"
            future: Future[evaluate.Raw] = Future()
            if self.broken:
                future.set_exception(BrokenProcessPool("gone"))
            else:
                future.set_result(evaluate.Raw([], [], [], 1.0))
            return future

        def shutdown(self) -> None: ...

    monkeypatch.setattr(evaluate, "ProcessPoolExecutor", Pool)
    found = evaluate.evaluate(
        evaluate.Model(Path(), {}),
        Suite(""),
        chosen_arms(["int8", "fp8", "fp8-kv-bf16"], False),
        None,
        "clean",
        lambda stage: None,
        2,
    )
    assert [result.arm for result in found.results] == ["int8", "fp8-kv-bf16"] and found.errors == {
        "fp8": "its process ended: gone"
    }


def test_fp8_pv_is_summed_as_the_tensor_cores_do() -> None:
    torch.manual_seed(2)
    for context, count in ((5, 5), (200, 1), (300, 70)):
        weights, values = torch.rand(2, 3, count, context), torch.randn(2, 1, context, 64)
        parts = list(emulation._products(weights, values))
        assert len(parts) == -(-context // emulation.KEYS_AT_ONCE)
        for number, part in enumerate(parts):
            keys = slice(number * emulation.KEYS_AT_ONCE, (number + 1) * emulation.KEYS_AT_ONCE)
            assert torch.allclose(part, weights[..., keys] @ values[:, :, keys], atol=1e-5)


def test_arms_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert [arm.name for arm in chosen_arms(["fp8"], True) if not arm.control] == ["fp8"]
    assert not any(arm.control for arm in chosen_arms([], False))
    assert main(["eval", "--list-arms"]) == 0
    listed = capsys.readouterr().out
    assert all(arm.name in listed for arm in ARMS)
    assert main(["eval", "--arms", "fp7"]) == 2
    assert "'fp7', which is no arm" in capsys.readouterr().err


def test_json_of_a_round_is_json() -> None:
    from sidestream.tools.quality.report import as_json

    text = json.dumps(as_json([Round("clean", again(1), [judged(good())])], {"model": "m"}))
    assert json.loads(text)["rounds"][0]["arms"][0]["identical"] is True


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
