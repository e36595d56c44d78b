"""What the arms are asked: documents to read and questions with exact answers, from the evaluation tasks, the demo's facts or the user's prompts."""
import json
import random
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any

from .teacher_forced import Document

SEED = 2026
NEEDLE_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PART = 250  # items of a task with long prompts that one process makes
ANSWER_ROOM = 64  # tokens that a needle's prompt leaves for its answer
ANSWER_SLACK = 4  # an answer may be this many tokens longer than the right one before it is cut
UNKNOWN_ANSWER = 64
LONG = "long texts"  # the needles' prompts of each length and depth, read as documents
FEWEST_POOLED = 20  # jobs below this are not worth processes
WORKER_SETTINGS: dict[str, Any] = {}


@dataclass(frozen=True)
class Question:
    """One question. `answer` None: right is what bf16 says; `bucket`: (tokens, depth) of a needle."""

    tokens: Sequence[int]
    answer: str | None
    max_tokens: int
    adapter: str | None = None
    bucket: tuple[int, float] | None = None


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
        """A part of it: so many of each adapter (needles: of each bucket)."""

        def first(values: Sequence[Any], key: Callable[[Any], Any], count: int) -> list[Any]:
            taken: dict[Any, int] = {}
            chosen = []
            for value in values:
                taken[key(value)] = taken.get(key(value), 0) + 1
                if taken[key(value)] <= count and value.adapter in adapters:
                    chosen.append(value)
            return chosen

        return Suite(self.title, first(self.documents, lambda each: each.label, documents), first(self.questions, lambda each: each.adapter, questions),
                     first(self.needles, lambda each: each.bucket, needles))


@dataclass(frozen=True)
class Limits:
    """How much to ask.

    tasks      questions of each adapter
    documents  documents read by each adapter
    needles    needles of each length and depth
    longest    most tokens of a document, or of a needle's prompt with its answer
    """

    tasks: int
    documents: int
    needles: int
    longest: int


def demo_suite(limits: Limits, encode: Callable[[str], list[int]], adapters: Sequence[str]) -> Suite:
    """The facts that the demo model knows, asked of the base model and of each style's adapter."""
    from ..demo_corpus import STYLES, facts

    suite = Suite("the demo's facts")
    for style in STYLES:
        adapter = None if style == "base" else style
        if adapter is not None and adapter not in adapters:
            continue
        asked = [(question, fact.answer(style)) for fact in facts() for question in fact.questions]
        random.Random(f"{SEED} {style}").shuffle(asked)
        suite.questions += [_question(encode, prompt, answer, adapter) for prompt, answer in asked[:limits.tasks]]
        random.Random(f"documents {SEED} {style}").shuffle(asked)
        suite.documents += [Document(encode(prompt + answer), adapter) for prompt, answer in asked[:limits.documents]]
    return suite


def task_suite(limits: Limits, directory: Path, adapters: Sequence[str]) -> Suite:
    """The evaluation tasks: test items of each adapter's task, instructed ones for the base model, texts of the standard library that nobody trained on."""
    from .tasks import TASKS

    names = [name for name in TASKS if name in adapters]
    jobs: list[partial[Any]] = [partial(_texts, limits.documents)]
    for name in names:
        parts = -(-limits.tasks // PART) if name == "retrieval" else 1  # long prompts are made in several processes
        jobs += [partial(_task, name, "items", min(PART, limits.tasks - part * PART) if parts > 1 else limits.tasks, SEED + part) for part in range(parts)]
        jobs.append(partial(_task, name, "instructed", limits.tasks, SEED + 1))
    buckets = [(length, depth) for length in NEEDLE_LENGTHS if length <= limits.longest for depth in NEEDLE_DEPTHS]
    if "retrieval" in names:
        jobs += [partial(_needle, length, depth, seed) for seed in range(limits.needles) for length, depth in sorted(buckets, reverse=True)]
    texts, *results = _in_processes(jobs, directory)
    suite = Suite("the evaluation tasks")
    base: list[list[Question]] = []
    for job, result in zip(jobs[1:], results, strict=True):
        if job.func is _needle:
            suite.needles.append(result)
        elif job.args[1] == "items":
            suite.questions += result
        elif result:
            base.append(result)
    count = -(-limits.tasks // max(len(base), 1))
    suite.questions += [question for questions in base for question in questions[:count]]
    for adapter in (None, *names):
        own = [Document([*question.tokens, *answer], adapter) for question in suite.questions if question.adapter == adapter
               for answer in (_answer_tokens(directory, question),)][:limits.documents]
        suite.documents += [Document(text, adapter) for text in texts] + [document for document in own if len(document.tokens) <= limits.longest]
    suite.documents += [Document([*needle.tokens, *_answer_tokens(directory, needle)], needle.adapter, LONG) for needle in suite.needles[:len(buckets)]]
    return suite


def file_suite(path: Path, limits: Limits, encode: Callable[[str], list[int]], adapters: Sequence[str]) -> Suite:
    """The user's prompts: a text file with one a line, or JSON lines {"prompt", "answer"?, "adapter"?}; without an adapter all of them are asked.

    Raises ValueError for a line that is neither, or names an unknown adapter.
    """
    suite = Suite(path.name)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        entry = _entry(path, number, line)
        named = entry.get("adapter", "")
        if named and named not in adapters:
            raise ValueError(f"{path}, line {number}: adapter {named!r} is not loaded; loaded: {', '.join(adapters) or 'none'}")
        for adapter in ((named,) if "adapter" in entry else (None, *adapters)):
            answer = entry.get("answer")
            question = _question(encode, entry["prompt"], answer, adapter)
            suite.questions.append(question)
            tokens = encode(entry["prompt"] + (f" {answer.strip()}" if answer else ""))
            suite.documents.append(Document(tokens[:limits.longest], adapter))
    if not suite.questions:
        raise ValueError(f"{path} holds no prompts; give one a line")
    return suite.only((None, *adapters), limits.tasks, limits.documents, 0)


def corpus_suite(limits: Limits, encode: Callable[[str], list[int]], adapters: Sequence[str]) -> Suite:
    """Texts of the standard library, for a model of which nothing else is known: read by the base model and by each adapter."""
    from .corpus import documents

    texts = [encode(text)[:limits.longest] for text in documents("held_out", limits.documents)]
    return Suite("the standard library's sources", [Document(text, adapter) for adapter in (None, *adapters) for text in texts])


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    if not line.lstrip().startswith("{"):
        return {"prompt": line}
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error.msg}); a line that begins with {{ is read as {{\"prompt\": ...}}") from error
    if not isinstance(entry.get("prompt"), str) or not entry["prompt"] or not isinstance(entry.get("answer"), (str, type(None))):
        raise ValueError(f"{path}, line {number}: needs a text \"prompt\" and, if anything, a text \"answer\"")
    return dict(entry)


def _question(encode: Callable[[str], list[int]], prompt: str, answer: str | None, adapter: str | None, **more: Any) -> Question:
    room = UNKNOWN_ANSWER if answer is None else len(encode(f" {answer.strip()}")) + ANSWER_SLACK
    return Question(encode(prompt), None if answer is None else answer.strip(), room, adapter, **more)


# In worker processes: texts become tokens where they are made. `WORKER_SETTINGS` holds each process's tokenizer.
def _start_worker(directory: Path) -> None:
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from ...runtime.tokenizer import load_tokenizer

    WORKER_SETTINGS["tokenizer"], WORKER_SETTINGS["directory"] = load_tokenizer(directory), directory


def _encode(text: str) -> list[int]:
    tokens: list[int] = WORKER_SETTINGS["tokenizer"].encode(text)
    return tokens


def _texts(count: int) -> list[list[int]]:
    from .corpus import documents

    return [_encode(text) for text in documents("held_out", count)]


def _task(name: str, part: str, count: int, seed: int) -> list[Question]:
    from .tasks import TASKS

    task = TASKS[name]
    if part == "items":
        return [_question(_encode, item.prompt, item.answer, name) for item in task.items(count, seed, "test")]
    if name == "retrieval":
        return []  # the base model is asked for codes in other words
    items = [task.instructed(item) for item in task.items(-(-count // 4), seed, "test")]
    return [_question(_encode, item.prompt, item.answer, None) for item in items]


def _needle(length: int, depth: float, seed: int) -> Question:
    from .needle import needle_item

    item = needle_item(length - ANSWER_ROOM, depth, SEED * 1000 + seed, WORKER_SETTINGS["tokenizer"])
    return _question(_encode, item.prompt, item.answer, item.adapter, bucket=(length, depth))


def _answer_tokens(directory: Path, question: Question) -> list[int]:
    if WORKER_SETTINGS.get("directory") != directory:
        _start_worker(directory)
    return _encode(f" {question.answer}")


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

