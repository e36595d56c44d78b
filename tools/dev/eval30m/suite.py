"""Documents, questions and needles for the evaluation models."""

import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from operator import call
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ....runtime.text.tokenizer import load_tokenizer
from ....runtime.worker.calibrate.scorer import Document
from ...eval.corpus import documents as library_documents
from ...eval.suite import SEED, Question, Suite, question
from ...eval.teacher_forced import ANSWER, DRAWN, TEXT
from .needles import needle_items, plain_characters
from .tasks import TASKS, Item

NEEDLE_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PART = 250  # retrieval items that one process makes
ANSWER_ROOM = 64  # tokens of a needle's prompt left for its answer
LONG, LONG_TEXTS = "long texts", 5  # group of needles that are read as documents, and how many of each length
_WORKER: dict[str, Any] = {}


class Asked(NamedTuple):
    """A question, and the same with its answer as a document."""

    question: Question
    document: Document


def needle_group(length: int, depth: float) -> str:
    """Return the group of needles of one length and depth."""
    return f"needle {length} tokens, depth {depth:g}"


def task_suite(directory: Path, tasks: int, documents: int, needles: int, longest: int) -> Suite:
    """Return test items of each adapter, instructed ones for the base model, held-out library sources, and needles.

    tasks      questions of each adapter
    documents  library sources that each adapter reads, and as many of its questions with their answers
    needles    texts of each length, each with a needle at every depth
    longest    tokens of a document or needle
    """
    hashed = [name for name in TASKS if TASKS[name].hashed]
    lengths = [length for length in NEEDLE_LENGTHS if length <= longest]
    parts = [min(PART, tasks - start) for start in range(0, tasks, PART)]  # long prompts are made in several processes
    jobs: list[Callable[[], Any]] = [partial(_texts, documents)]
    jobs += [partial(_items, name, tasks, SEED) for name in hashed]
    jobs += [partial(_items, "retrieval", count, SEED + part) for part, count in enumerate(parts)]
    jobs += [partial(_instructed, name, -(-tasks // 4), SEED + 1) for name in hashed]
    jobs += [partial(_needles, length, seed) for seed in range(needles) for length in sorted(lengths, reverse=True)]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), get_context("spawn"), _start, (directory,)) as pool:
        texts, *results = pool.map(call, jobs)
    first, last = len(hashed) + len(parts), 2 * len(hashed) + len(parts)
    base = [asked for group in results[first:last] for asked in group[: -(-tasks // len(hashed))]]
    questions = [asked for group in results[:first] for asked in group] + base
    hidden = results[last:]
    suite = Suite("the evaluation tasks", questions=[asked.question for asked in questions])
    for adapter in (None, *TASKS):
        mine = [asked.document for asked in questions if asked.question.adapter == adapter][:documents]
        suite.documents += [Document(text, adapter) for text in texts]
        suite.documents += [document for document in mine if len(document.tokens) <= longest]
    for index, group in enumerate(hidden):
        suite.questions += [asked.question for asked in group]
        if index < LONG_TEXTS * len(lengths):
            suite.documents.append(group[index % len(group)].document)
    return suite


def adapter_documents(directory: Path, adapters: Sequence[str], texts: int, tasks: int, longest: int) -> list[Document]:
    """Return `texts` held-out library sources for the base model and for each adapter, and `tasks` questions with their
    answers for each adapter. Documents have at most `longest` tokens.
    """
    _start(directory)
    sources = [each[:longest] for each in _texts(texts)]
    documents = [Document(text, adapter) for adapter in (None, *adapters) for text in sources]
    asked = [each.document for name in adapters for each in _items(name, tasks, SEED)]
    return documents + [document for document in asked if len(document.tokens) <= longest]


def _start(directory: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    own = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None  # the file has just been read
    _WORKER["encode"] = lambda text: array("i", tokenizer.encode(text))  # small to send to the parent process
    _WORKER["offsets"] = lambda text: own.encode(text).offsets


def _texts(count: int) -> list[Sequence[int]]:
    return [_WORKER["encode"](text) for text in library_documents("held_out", count)]


def _items(name: str, count: int, seed: int) -> list[Asked]:
    task = TASKS[name]
    return [_asked(item, name, hidden=not task.hashed) for item in task.items(count, seed, "test")]


def _instructed(name: str, count: int, seed: int) -> list[Asked]:
    task = TASKS[name]
    return [_asked(task.instructed(item), None) for item in task.items(count, seed, "test")]


def _needles(length: int, seed: int) -> list[Asked]:
    items = needle_items(length - ANSWER_ROOM, NEEDLE_DEPTHS, SEED * 1000 + seed, _WORKER["encode"])
    return [
        _asked(Item(each.prompt, each.answer), "retrieval", True, needle_group(length, each.depth)) for each in items
    ]


def _asked(item: Item, adapter: str | None, hidden: bool = False, group: str = "") -> Asked:
    """Return a question and its document, with the tokens marked that a task draws at random.

    `hidden`: the prompt is ordinary text with codes hidden in it.
    """
    encode = _WORKER["encode"]
    made = question(encode, item.prompt, item.answer, adapter, group)
    answer = encode(f" {item.answer}")[len(encode("")) :]  # without the tokens that open a text
    return Asked(made, read_document(made, answer, _plain(item.prompt) if hidden else b"", LONG if group else ""))


def read_document(asked: Question, answer: Sequence[int], plain: bytes = b"", group: str = "") -> Document:
    """Return the question and its answer as a document; `plain` is 1 for tokens of ordinary text (b"": none is)."""
    kinds = bytes(TEXT if each else DRAWN for each in plain[1:]) or bytes([DRAWN]) * (len(asked.tokens) - 1)
    tokens = array("i", [*asked.tokens, *answer])
    return Document(tokens, asked.adapter, group, kinds + bytes([ANSWER]) * (len(answer) + 1))


def _plain(prompt: str) -> bytes:
    """Return 1 for each token of ordinary text of a retrieval prompt."""
    plain = plain_characters(prompt)
    return bytes(int(stop > start and plain[start]) for start, stop in _WORKER["offsets"](prompt))
