"""The questions of the evaluation models: seeded, split, and right by an independent computation."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from sidestream.tools.dev.eval30m.needles import needle_items, plain_characters
from sidestream.tools.dev.eval30m.tasks import TASKS, Task
from sidestream.tools.eval import corpus
from sidestream.tools.eval.corpus import documents, is_held_out, library_files
from sidestream.tools.eval.real.tasks import training_questions


def encode(text: str) -> bytes:
    """One token per byte."""
    return text.encode()


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.adapter)
def test_items_are_seeded_different_and_split(task: Task) -> None:
    count = 8 if task.adapter == "retrieval" else 300
    tested = task.items(count, 7, "test")
    assert tested == task.items(count, 7, "test") and tested != task.items(count, 8, "test")
    assert len({item.prompt for item in tested}) == count
    assert not {item.prompt for item in tested} & {item.prompt for item in task.items(5 * count, 7, "train")}
    assert all(item.answer == item.answer.strip() != "" for item in tested), "answers are compared after strip"


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"retrieval"}))
def test_there_are_enough_test_items(name: str) -> None:
    assert len(TASKS[name].items(3500, 0, "test")) == 3500


def test_sums_are_right() -> None:
    for item in TASKS["arithmetic"].items(200, 1, "test"):
        assert int(item.answer) == eval(item.prompt.removesuffix("=>"))


def test_numbers_are_sorted() -> None:
    for item in TASKS["sorting"].items(100, 1, "test"):
        assert [int(word) for word in item.answer.split()] == sorted(
            int(word) for word in item.prompt.removesuffix("=>").split()
        )


def test_programs_print_the_answer() -> None:
    for item in TASKS["programs"].items(200, 1, "train"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(item.prompt.removesuffix("=>"))
        assert printed.getvalue().strip() == item.answer


def test_letters_are_transformed() -> None:
    known = {
        "reverse": lambda text: text[::-1],
        "rotate": lambda text: text[1:] + text[0],
        "evens": lambda text: text[::2],
        "next": lambda text: text.translate({ord("a") + index: ord("a") + (index + 1) % 26 for index in range(26)}),
        "consonants": lambda text: re.sub("[aeiou]", "", text) or text,
    }
    seen = set()
    for item in TASKS["strings"].items(400, 1, "test"):
        name, letters = item.prompt.removesuffix(" =>").split(": ")
        if name in known:
            seen.add(name)
            assert item.answer.replace(" ", "") == known[name](letters.replace(" ", ""))
    assert seen == set(known)


def test_orders_are_read_into_json() -> None:
    for item in TASKS["json"].items(200, 1, "test"):
        record = json.loads(item.answer)
        sentence = next(line for line in item.prompt.splitlines() if str(record["order"]) in line)
        assert (
            record["name"] in sentence
            and record["goods"] in sentence
            and item.prompt.endswith(f"order {record['order']} =>")
        )
        count = re.findall(rf"(\d) {record['goods']}", sentence)[0]
        assert record["total"] % int(count) == 0 and str(record["total"] // int(count)) in re.findall(
            r"\b\d\d\b", sentence
        )


def test_codes_stand_once_in_the_text() -> None:
    for item in TASKS["retrieval"].items(6, 1, "test"):
        key = item.prompt.splitlines()[-1].removesuffix(" =>")
        assert item.prompt.count(f"The code of {key} is {item.answer}.\n") == 1


@pytest.mark.parametrize("tokens", [300, 4000])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_lies_where_it_is_asked_for(tokens: int, depth: float) -> None:
    (item,) = needle_items(tokens, (depth,), 3, encode)
    assert item.tokens == len(encode(item.prompt)) <= tokens and item.tokens > 0.75 * tokens
    place = re.search(rf"The code of \w+ \d+ is {item.answer}\.\n", item.prompt)
    assert place is not None and place.start() / len(item.prompt) == pytest.approx(
        depth, abs=0.3 if tokens == 300 else 0.05
    )
    assert [item] == needle_items(tokens, (depth,), 3, encode) != needle_items(tokens, (depth,), 4, encode)


def test_needles_of_one_text_lie_at_their_depths_and_share_it() -> None:
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    items = needle_items(4000, depths, 3, encode)
    texts = {item.prompt.rpartition("\n")[0] for item in items}
    assert (
        len(texts) == 1
        and len({item.answer for item in items}) == len(depths) == [item.depth for item in items].index(1.0) + 1
    )
    text = texts.pop()
    assert (
        text.count("The code of") == 8
        and text.startswith("The code of")
        and text.splitlines()[-1].startswith("The code of")
    )
    for item in items:
        key = item.prompt.splitlines()[-1].removesuffix(" =>")
        place = item.prompt.index(f"The code of {key} is {item.answer}.\n")
        assert place / len(item.prompt) == pytest.approx(item.depth, abs=0.05) and 3900 < item.tokens <= 4000


def test_lines_that_state_codes_are_told_from_text() -> None:
    prompt = "import os\nThe code of delta 423 is 48291.\nThe code of it all\ndelta 423 =>"
    plain = plain_characters(prompt)
    assert (
        "".join(letter for letter, is_plain in zip(prompt, plain, strict=True) if is_plain)
        == "import os\nThe code of it all\n"
    )


def test_a_needle_needs_room_and_a_depth() -> None:
    for tokens, depth in ((10, 0.5), (1000, 1.5)):
        with pytest.raises(ValueError, match="needle"):
            needle_items(tokens, (depth,), 0, encode)


def test_documents_are_split_by_file() -> None:
    held = list(documents("held_out"))
    assert len(held) >= 400 and sum(map(len, held)) > 3 * 200_000
    assert not set(held) & set(documents("train"))
    assert list(documents("held_out", 5)) == held[:5]
    assert 0.05 < sum(map(is_held_out, library_files())) / len(library_files()) < 0.3
    with pytest.raises(ValueError, match="split"):
        list(documents("test"))  # type: ignore[arg-type]


def test_copies_of_held_out_files_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"module{index}.py" for index in range(20)]
    held = [name for name in names if is_held_out(name)]
    assert 0 < len(held) < len(names)
    for index, name in enumerate(names):
        (tmp_path / name).write_text("".join(f"line {line} of {index}\n" for line in range(120)))
    copy = next(name for name in names if name not in held)
    (tmp_path / copy).write_text((tmp_path / held[0]).read_text())
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(corpus, "library_files", lambda: tuple(names))
    monkeypatch.setattr(corpus, "_pieces", corpus._pieces.__wrapped__)
    assert len(list(documents("train"))) == len(names) - len(held) - 1
    assert len(list(documents("held_out"))) == len(held)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split"):
        TASKS["arithmetic"].items(1, 0, "held_out")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sorting", "strings", "json"])
def test_adapters_of_the_real_model_learn_the_same_questions(name: str) -> None:
    items = TASKS[name].items(200, 0, "train")
    assert training_questions(name, 200, 0) == [(item.prompt, item.answer) for item in items]
