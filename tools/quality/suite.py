"""What the arms are asked: documents to read and questions with exact answers, from the evaluation tasks, the demo's
facts or the user's prompts.
"""

import json
import random
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any

from ...ops.core.kv_layout import PAGE_SIZE
from ...runtime.worker.calibrate.reader import Document
from .teacher_forced import ANSWER, DRAWN, TEXT

SEED = 2026
NEEDLE_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PART = 250  # items of a task with long prompts that one process makes
ANSWER_ROOM = 64  # tokens that a needle's prompt leaves for its answer
ANSWER_SLACK = 4  # an answer may be this many tokens longer than the right one before it is cut
UNKNOWN_ANSWER = 64
LONG = "long texts"  # needles' prompts, read as documents, so many of each length:
LONG_TEXTS = 5
FEWEST_POOLED = 20  # jobs below this are not worth processes
WORKER_SETTINGS: dict[str, Any] = {}


@dataclass(frozen=True)
class Question:
    """One question. `answer` None: right is what bf16 says; `bucket`: (tokens, depth) of a needle; `plain`: 1 for each
    token that is ordinary text, where some are and others were drawn at random."""

    tokens: Sequence[int]
    answer: str | None
    max_tokens: int
    adapter: str | None = None
    bucket: tuple[int, float] | None = None
    plain: bytes = b""

    def document(self, answer: Sequence[int], group: str = "") -> Document:
        """The question and its answer to read; what the task has drawn at random is marked, and so is the answer."""
        told = bytes(TEXT if plain else DRAWN for plain in self.plain[1:]) or bytes([DRAWN]) * (len(self.tokens) - 1)
        return Document(
            array("i", [*self.tokens, *answer]), self.adapter, group, told + bytes([ANSWER]) * (len(answer) + 1)
        )


@dataclass
class Suite:
    """All that is asked of every arm."""

    title: str
    documents: list[Document] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    needles: list[Question] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, or document."""
        asked = (len(question.tokens) + question.max_tokens for question in (*self.questions, *self.needles))
        return max((*asked, *(len(document.tokens) for document in self.documents)), default=1)

    def only(self, adapters: Container[str | None], questions: int, documents: int, needles: int) -> "Suite":
        """A part of it: so many questions of each adapter, documents of each adapter and sort, needles of each
        bucket.
        """

        def first(values: Sequence[Any], key: Callable[[Any], Any], count: int) -> list[Any]:
            taken: dict[Any, int] = {}
            chosen = []
            for value in values:
                taken[key(value)] = taken.get(key(value), 0) + 1
                if taken[key(value)] <= count and value.adapter in adapters:
                    chosen.append(value)
            return chosen

        return Suite(
            self.title,
            first(self.documents, lambda each: (each.label, bool(each.kinds)), documents),
            first(self.questions, lambda each: each.adapter, questions),
            first(self.needles, lambda each: each.bucket, needles),
        )


@dataclass(frozen=True)
class Limits:
    """How much to ask.

    tasks      questions of each adapter
    documents  texts read by each adapter, and as many of its questions with their answers
    needles    texts of each length that hide a needle at every depth
    longest    most tokens of a document, or of a needle's prompt with its answer
    """

    tasks: int
    documents: int
    needles: int
    longest: int


def demo_suite(limits: Limits, encode: Callable[[str], list[int]], adapters: Sequence[str]) -> Suite:
    """The facts that the demo model knows, asked of the base model and of each style's adapter."""
    from .demo_corpus import STYLES, facts

    suite = Suite("the demo's facts")
    for style in STYLES:
        adapter = None if style == "base" else style
        if adapter is not None and adapter not in adapters:
            continue
        asked = [(question, fact.answer(style)) for fact in facts() for question in fact.questions]
        random.Random(f"{SEED} {style}").shuffle(asked)
        suite.questions += [_question(encode, prompt, answer, adapter) for prompt, answer in asked[: limits.tasks]]
        random.Random(f"documents {SEED} {style}").shuffle(asked)
        suite.documents += [Document(encode(prompt + answer), adapter) for prompt, answer in asked[: limits.documents]]
    return suite


def task_suite(limits: Limits, directory: Path, adapters: Sequence[str]) -> Suite:
    """The evaluation tasks: test items of each adapter's task, instructed ones for the base model, texts of the
    standard library that nobody trained on.
    """
    from .tasks import TASKS

    names = [name for name in TASKS if name in adapters]
    jobs: list[partial[Any]] = [partial(_texts, limits.documents)]
    for name in names:
        parts = -(-limits.tasks // PART) if name == "retrieval" else 1  # long prompts are made in several processes
        jobs += [
            partial(
                _task, name, "items", min(PART, limits.tasks - part * PART) if parts > 1 else limits.tasks, SEED + part
            )
            for part in range(parts)
        ]
        jobs.append(partial(_task, name, "instructed", limits.tasks, SEED + 1))
    lengths = [length for length in NEEDLE_LENGTHS if length <= limits.longest]
    if "retrieval" in names:
        jobs += [
            partial(_needles, length, seed)
            for seed in range(limits.needles)
            for length in sorted(lengths, reverse=True)
        ]
    texts, *results = _in_processes(jobs, directory)
    suite = Suite("the evaluation tasks")
    base: list[list[Question]] = []
    for job, result in zip(jobs[1:], results, strict=True):
        if job.func is _needles:
            suite.needles += result
        elif job.args[1] == "items":
            suite.questions += result
        elif result:
            base.append(result)
    count = -(-limits.tasks // max(len(base), 1))
    suite.questions += [question for questions in base for question in questions[:count]]
    for adapter in (None, *names):
        mine = [question for question in suite.questions if question.adapter == adapter][: limits.documents]
        own = [question.document(_answer_tokens(directory, question)) for question in mine]
        suite.documents += [Document(text, adapter) for text in texts] + [
            document for document in own if len(document.tokens) <= limits.longest
        ]
    texts_apart = [
        suite.needles[place * len(NEEDLE_DEPTHS) + place % len(NEEDLE_DEPTHS)]
        for place in range(len(suite.needles) // len(NEEDLE_DEPTHS))
    ]
    suite.documents += [
        needle.document(_answer_tokens(directory, needle), LONG) for needle in texts_apart[: LONG_TEXTS * len(lengths)]
    ]
    return suite


def file_suite(path: Path, limits: Limits, encode: Callable[[str], list[int]], adapters: Sequence[str]) -> Suite:
    """The user's prompts: a text file with one a line, or JSON lines {"prompt", "answer"?, "adapter"?}; without an
    adapter all of them are asked.

    Raises ValueError for a line that is neither, or names an unknown adapter.
    """
    suite = Suite(path.name)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        entry = _entry(path, number, line)
        named = entry.get("adapter", "")
        if named and named not in adapters:
            raise ValueError(
                f"{path}, line {number}: adapter {named!r} is not loaded; loaded: {', '.join(adapters) or 'none'}"
            )
        for adapter in (named,) if "adapter" in entry else (None, *adapters):
            answer = entry.get("answer")
            question = _question(encode, entry["prompt"], answer, adapter)
            suite.questions.append(question)
            tokens = encode(entry["prompt"] + (f" {answer.strip()}" if answer else ""))
            suite.documents.append(Document(tokens[: limits.longest], adapter))
    if not suite.questions:
        raise ValueError(f"{path} holds no prompts; give one a line")
    return suite.only((None, *adapters), limits.tasks, limits.documents, 0)


def corpus_suite(limits: Limits, encode: Callable[[str], list[int]], adapters: Sequence[str]) -> Suite:
    """Texts of the standard library, for a model of which nothing else is known: read by the base model and by each
    adapter.
    """
    from .corpus import documents

    texts = [encode(text)[: limits.longest] for text in documents("held_out", limits.documents)]
    return Suite(
        "the standard library's sources", [Document(text, adapter) for adapter in (None, *adapters) for text in texts]
    )


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    if not line.lstrip().startswith("{"):
        return {"prompt": line}
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f'{path}, line {number}: not JSON ({error.msg}); a line that begins with {{ is read as {{"prompt": ...}}'
        ) from error
    if (
        not isinstance(entry.get("prompt"), str)
        or not entry["prompt"]
        or not isinstance(entry.get("answer"), (str, type(None)))
    ):
        raise ValueError(f'{path}, line {number}: needs a text "prompt" and, if anything, a text "answer"')
    return dict(entry)


def _question(
    encode: Callable[[str], Sequence[int]], prompt: str, answer: str | None, adapter: str | None, **more: Any
) -> Question:
    """The question as token ids; without an answer it may say up to UNKNOWN_ANSWER tokens."""
    room = UNKNOWN_ANSWER if answer is None else len(encode(f" {answer.strip()}")) + ANSWER_SLACK
    return Question(encode(prompt), None if answer is None else answer.strip(), room, adapter, **more)


# In worker processes: texts become tokens where they are made. `WORKER_SETTINGS` holds each process's tokenizer.
def _start_worker(directory: Path) -> None:
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    from ...runtime.text.tokenizer import load_tokenizer

    its_own = Tokenizer.from_file(str(directory / "tokenizer.json"))
    WORKER_SETTINGS["tokenizer"], WORKER_SETTINGS["directory"] = load_tokenizer(directory), directory
    WORKER_SETTINGS["offsets"] = lambda text: its_own.encode(text).offsets


def _encode(text: str) -> Sequence[int]:
    return array("i", WORKER_SETTINGS["tokenizer"].encode(text))  # millions of them go from process to process


def _texts(count: int) -> list[Sequence[int]]:
    from .corpus import documents

    return [_encode(text) for text in documents("held_out", count)]


def _task(name: str, part: str, count: int, seed: int) -> list[Question]:
    from .tasks import TASKS

    task = TASKS[name]
    if part == "items":
        return [
            _question(
                _encode, item.prompt, item.answer, name, plain=_plain(item.prompt) if name == "retrieval" else b""
            )
            for item in task.items(count, seed, "test")
        ]
    if name == "retrieval":
        return []  # the base model is asked for codes in other words
    items = [task.instructed(item) for item in task.items(-(-count // 4), seed, "test")]
    return [_question(_encode, item.prompt, item.answer, None) for item in items]


def _needles(length: int, seed: int) -> list[Question]:
    from .needle import needle_items

    items = needle_items(length - ANSWER_ROOM, NEEDLE_DEPTHS, SEED * 1000 + seed, WORKER_SETTINGS["tokenizer"])
    return [
        _question(
            _encode, item.prompt, item.answer, item.adapter, bucket=(length, item.depth), plain=_plain(item.prompt)
        )
        for item in items
    ]


def _plain(prompt: str) -> bytes:
    """1 for each token of a retrieval prompt that is ordinary text."""
    from .needle import plain_characters

    plain = plain_characters(prompt)
    return bytes(int(stop > start and plain[start]) for start, stop in WORKER_SETTINGS["offsets"](prompt))


def _answer_tokens(directory: Path, question: Question) -> Sequence[int]:
    """The answer as it follows the question: without the tokens that open a text."""
    if WORKER_SETTINGS.get("directory") != directory:
        _start_worker(directory)
    return _encode(f" {question.answer}")[len(_encode("")) :]


def _run(job: Callable[[], Any]) -> Any:
    return job()


def _in_processes(jobs: Sequence[partial[Any]], directory: Path) -> Iterator[Any]:
    workers = min(cpu_count() or 1, len(jobs))
    if workers < 3 or len(jobs) < FEWEST_POOLED:
        _start_worker(directory)
        yield from map(_run, jobs)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (directory,)) as pool:
        yield from pool.map(_run, jobs)


def interleaved(questions: Sequence[Question], seed: int) -> list[int]:
    """An order in which to ask: shuffled, so that a batch mixes adapters and lengths."""
    order = list(range(len(questions)))
    random.Random(seed).shuffle(order)
    return order


def by_text(questions: Sequence[Question], seed: int) -> list[int]:
    """The same for needles: texts are shuffled, and questions about one stay together, so that its keys and values
    are still there for the next.
    """
    texts: dict[tuple[int, ...], list[int]] = {}
    for place in interleaved(questions, seed):
        texts.setdefault(tuple(questions[place].tokens[:PAGE_SIZE]), []).append(place)
    return [place for places in texts.values() for place in places]
