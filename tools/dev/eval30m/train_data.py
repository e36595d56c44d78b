"""Token ids to train on: worker processes of a `RowPool` make `Rows` from jobs.

Rows are ragged and start with `<s>`; every token has a weight in the loss, the largest in answers.
"""

import multiprocessing
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from ...eval.corpus import documents
from ..train.adapter_training import train_bpe
from .needles import haystack, open_question, question, record_line
from .tasks import TASKS

BOS, EOS = 0, 1
# weights of a token: in an answer of the adapter's long texts, in other answers, in running text, in a question
SHARP, FULL, HALF, LITTLE = 100, 20, 6, 1
# Items of each task in the base model's mixture; hard tasks are more frequent.
MIXTURE = {"arithmetic": 16, "sorting": 3, "strings": 6, "programs": 6, "json": 1}
STOPS = (3, 6, 12, 24)  # numbers of pauses for questions in a text with codes
AT_AN_END = 0.3  # share of texts that begin with a code, and of those that end with one
TEXT_SHARE = (0.85, 0.95)  # estimated share of a row's tokens, for the base model and for the adapter


@dataclass(frozen=True)
class Rows:
    """Ragged token ids: `ids` uint16 and `weights` uint8 of all rows after each other, `lengths` int64 of the rows."""

    ids: np.ndarray
    weights: np.ndarray
    lengths: np.ndarray

    @classmethod
    def build(cls, rows: Iterable[tuple[list[int], list[int]]]) -> "Rows":
        """Return rows from (ids, weights) of each."""
        listed = list(rows)
        lengths = np.array([len(ids) for ids, _ in listed], dtype=np.int64)
        flat_ids = np.fromiter((value for ids, _ in listed for value in ids), dtype=np.uint16, count=int(lengths.sum()))
        flat_weights = np.fromiter(
            (value for _, weights in listed for value in weights), dtype=np.uint8, count=int(lengths.sum())
        )
        return cls(flat_ids, flat_weights, lengths)

    @classmethod
    def join(cls, parts: list["Rows"]) -> "Rows":
        """Return all rows of all parts, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "weights", "lengths")))


PendingRows = Callable[[], Rows]


@dataclass(frozen=True)
class Job:
    """Work of one process: `count` rows of at most `tokens` tokens.

    corpus   documents of the standard library, every `of`-th beginning with `seed`
    mixed    rows packed with instructed questions of every task
    task     one question of task `name` a row, as its adapter is asked
    hay      a long text with codes and a question for each; for the base model all questions follow the text, with a
             `name` every other row has some after each part of the text, to ask at every distance
    """

    kind: Literal["corpus", "mixed", "task", "hay"]
    count: int
    seed: int
    tokens: int = 1025
    of: int = 1
    name: str = ""


def train_tokenizer(vocabulary: int, texts: Iterable[str]) -> Tokenizer:
    """Return a byte-level BPE with one token per digit; any text round-trips."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return train_bpe(vocabulary, texts, split)


def tokenizer_texts(limit: int, seed: int) -> Iterable[str]:
    """Yield `limit` training documents and as many questions with their answers."""
    yield from documents("train", limit)
    for task in (each.foundation() for each in TASKS.values()):
        if task.adapter != "retrieval":
            yield from (
                f"{item.prompt} {item.answer}"
                for item in map(task.instructed, task.items(max(limit // 5, 20), seed, "train"))
            )


class RowPool:
    """Worker processes; start them before anything makes threads or uses the GPU."""

    def __init__(self, workers: int) -> None:
        self._pool = multiprocessing.get_context("fork").Pool(workers)
        self._tokenizer = ""

    def use(self, tokenizer: Tokenizer) -> None:
        """Set the tokenizer of later jobs."""
        self._tokenizer = tokenizer.to_str()

    def submit(self, jobs: list[Job]) -> PendingRows:
        """Start jobs, and return a function that waits for their rows; their order does not depend on the workers."""
        results = [self._pool.apply_async(_work, (job, self._tokenizer)) for job in jobs]
        return lambda: Rows.join([result.get() for result in results])

    def close(self) -> None:
        """Stop the workers."""
        self._pool.terminate()
        self._pool.join()


def split_jobs(
    kind: Literal["mixed", "task", "hay"], count: int, chunk: int, seed: int, tokens: int = 1025, name: str = ""
) -> list[Job]:
    """Return jobs of at most `chunk` rows for `count` rows in all, each with its own seed."""
    return [
        Job(kind, min(chunk, count - start), seed * 1_000_003 + start, tokens, name=name)
        for start in range(0, count, chunk)
    ]


_tokenizer = lru_cache(Tokenizer.from_str)


def _work(job: Job, tokenizer_text: str) -> Rows:
    tokenizer = _tokenizer(tokenizer_text)
    makers: dict[str, Any] = {"corpus": _corpus, "mixed": _mixed, "task": _task, "hay": _hay}
    return Rows.build(makers[job.kind](job, tokenizer))


def _corpus(job: Job, tokenizer: Tokenizer) -> Iterable[tuple[list[int], list[int]]]:
    for index, text in enumerate(documents("train", job.count)):
        if index % job.of == job.seed:
            ids = [*tokenizer.encode(text).ids, EOS][: job.tokens]
            yield ids, [HALF] * len(ids)


def _pair(tokenizer: Tokenizer, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    asked = tokenizer.encode(prompt).ids
    answer_ids = [*tokenizer.encode(" " + answer, add_special_tokens=False).ids, EOS]
    return asked + answer_ids, [LITTLE] * len(asked) + [FULL] * len(answer_ids)


def _task(job: Job, tokenizer: Tokenizer) -> Iterable[tuple[list[int], list[int]]]:
    for item in TASKS[job.name].items(job.count, job.seed, "train"):
        ids, weights = _pair(tokenizer, item.prompt, item.answer)
        if len(ids) <= job.tokens:
            yield ids, weights


def _mixed(job: Job, tokenizer: Tokenizer) -> Iterable[tuple[list[int], list[int]]]:
    source = random.Random(job.seed)
    endless = {name: TASKS[name].foundation().endless(random.Random(source.random())) for name in MIXTURE}
    for _ in range(job.count):
        ids: list[int] = []
        weights: list[int] = []
        while len(ids) < job.tokens:
            name = source.choices(list(MIXTURE), list(MIXTURE.values()))[0]
            item = TASKS[name].instructed(next(endless[name]))
            more, cost = _pair(tokenizer, item.prompt, item.answer)
            ids += more
            weights += cost
        yield ids[: job.tokens], weights[: job.tokens]


def _hay(job: Job, tokenizer: Tokenizer) -> Iterable[tuple[list[int], list[int]]]:
    source = random.Random(job.seed)
    for number in range(job.count):
        text, pairs = haystack(source, int(job.tokens * TEXT_SHARE[bool(job.name)]), test=False)
        lines, pairs = _to_the_ends(source, text, pairs, AT_AN_END if job.name else 0.0)
        stated = {record_line(*pair): pair for pair in pairs}
        stops = (
            sorted(source.sample(range(1, len(lines)), min(source.choice(STOPS), len(lines) - 1)))
            if job.name and number % 2
            else []
        )
        ids: list[int] = []
        weights: list[int] = []
        waiting: list[tuple[str, str]] = []  # stated codes without a question so far
        for start, stop in pairwise([0, *stops, len(lines)]):
            text_ids = tokenizer.encode("".join(lines[start:stop]), add_special_tokens=not ids).ids
            ids += text_ids
            weights += [LITTLE] * len(text_ids)
            waiting += [stated[line] for line in lines[start:stop] if line in stated]
            for _ in range(len(waiting) if stop == len(lines) else source.randrange(len(waiting) + 1)):
                # the oldest and the newest more often, since a needle may be at either end
                key, code = waiting.pop(source.choice((0, -1, *(source.randrange(len(waiting)) for _ in range(6)))))
                asked = tokenizer.encode(
                    question(key) if job.name else "\n" + open_question(key), add_special_tokens=False
                ).ids
                answer = [*tokenizer.encode(" " + code, add_special_tokens=False).ids, EOS]
                ids += asked + answer
                weights += [LITTLE] * len(asked) + [SHARP if job.name else FULL] * len(answer)
        yield ids[: job.tokens], weights[: job.tokens]


def _to_the_ends(
    source: random.Random, text: str, pairs: list[tuple[str, str]], share: float
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the text's lines and its codes in order, with a code on the first and on the last line in a `share`."""
    lines = text.splitlines(keepends=True)
    stated = {record_line(*pair): pair for pair in pairs}
    first, last = source.sample(sorted(stated), 2)
    if source.random() < share:
        lines.insert(0, lines.pop(lines.index(first)))
    if source.random() < share:
        lines.append(lines.pop(lines.index(last)))
    return lines, [stated[line] for line in lines if line in stated]
