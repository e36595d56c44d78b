"""Token ids to train on, made by all cores: `Workshop` hands out jobs, each job becomes `Rows`.

Rows are ragged and start with `<s>`; every token has a weight in the loss: answers count most, questions little.
"""

import multiprocessing
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from multiprocessing.pool import AsyncResult
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .corpus import documents
from .needle import haystack, open_question, question
from .tasks import TASKS

BOS, EOS = 0, 1
FULL, HALF, LITTLE = 20, 6, 1  # weights of a token's loss: in an answer, in running text, in a question
# How often each task is met in the base model's mixture, by items; what is hard to learn more often.
MIXTURE = {"arithmetic": 10, "sorting": 3, "strings": 6, "programs": 6, "json": 1}


@dataclass(frozen=True)
class Rows:
    """Ragged token ids: `ids` uint16 and `weights` uint8 of all rows behind each other, `lengths` int64 of the rows."""

    ids: np.ndarray
    weights: np.ndarray
    lengths: np.ndarray

    @classmethod
    def build(cls, rows: Iterable[tuple[list[int], list[int]]]) -> "Rows":
        """From (ids, weights) of each row."""
        listed = list(rows)
        lengths = np.array([len(ids) for ids, _ in listed], dtype=np.int64)
        flat_ids = np.fromiter((value for ids, _ in listed for value in ids), dtype=np.uint16, count=int(lengths.sum()))
        flat_weights = np.fromiter((value for _, weights in listed for value in weights), dtype=np.uint8, count=int(lengths.sum()))
        return cls(flat_ids, flat_weights, lengths)

    @classmethod
    def join(cls, parts: list["Rows"]) -> "Rows":
        """All rows of all parts, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "weights", "lengths")))


@dataclass(frozen=True)
class Job:
    """What one worker makes: `count` rows of at most `tokens` tokens.

    corpus   documents of the standard library, every `of`-th beginning with `seed`
    mixed    rows packed with instructed questions of every task
    task     one question of task `name` a row, as its adapter is asked
    hay      a long text with codes and then as many questions as there are codes; worded for the adapter if `name` is given
    """

    kind: Literal["corpus", "mixed", "task", "hay"]
    count: int
    seed: int
    tokens: int = 1025
    of: int = 1
    name: str = ""


def train_tokenizer(vocabulary: int, texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE in which every digit is a token of its own; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>", "</s>"], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def tokenizer_texts(limit: int, seed: int) -> Iterable[str]:
    """What the tokenizer learns from: `limit` training documents and as many questions with their answers."""
    yield from documents("train", limit)
    for task in (each.foundation() for each in TASKS.values()):
        if task.adapter != "retrieval":
            yield from (f"{item.prompt} {item.answer}" for item in map(task.instructed, task.items(max(limit // 5, 20), seed, "train")))


class Workshop:
    """Worker processes, which must be started before anything else makes threads or touches the GPU."""

    def __init__(self, workers: int) -> None:
        self._pool = multiprocessing.get_context("fork").Pool(workers)
        self._tokenizer = ""

    def use(self, tokenizer: Tokenizer) -> None:
        """The tokenizer of all jobs to come."""
        self._tokenizer = tokenizer.to_str()

    def order(self, jobs: list[Job]) -> "Order":
        """Starts jobs; the result waits for them."""
        return Order([self._pool.apply_async(_work, (job, self._tokenizer)) for job in jobs])

    def close(self) -> None:
        """Ends the workers."""
        self._pool.terminate()
        self._pool.join()


class Order:
    """Rows under way."""

    def __init__(self, results: list[AsyncResult]) -> None:
        self._results = results

    def rows(self) -> Rows:
        """Waits for the rows; they don't depend on which worker was faster."""
        return Rows.join([result.get() for result in self._results])


def split_jobs(kind: Literal["mixed", "task", "hay"], count: int, chunk: int, seed: int, tokens: int = 1025, name: str = "") -> list[Job]:
    """Jobs of at most `chunk` rows for `count` rows in all, every one with a seed of its own."""
    return [Job(kind, min(chunk, count - start), seed * 1_000_003 + start, tokens, name=name) for start in range(0, count, chunk)]


@cache
def _tokenizer(text: str) -> Tokenizer:
    return Tokenizer.from_str(text)


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
    asked, told = tokenizer.encode(prompt).ids, [*tokenizer.encode(" " + answer, add_special_tokens=False).ids, EOS]
    return asked + told, [LITTLE] * len(asked) + [FULL] * len(told)


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
    for _ in range(job.count):
        text, pairs = haystack(source, int(job.tokens * 0.85), test=False)
        ids = tokenizer.encode(text).ids
        weights = [LITTLE] * len(ids)
        source.shuffle(pairs)
        for key, code in pairs:
            asked = tokenizer.encode(question(key) if job.name else "\n" + open_question(key), add_special_tokens=False).ids
            told = [*tokenizer.encode(" " + code, add_special_tokens=False).ids, EOS]
            if len(ids) + len(asked) + len(told) > job.tokens:
                break
            ids += asked + told
            weights += [LITTLE] * len(asked) + [FULL] * len(told)
        if len(ids) <= job.tokens:
            yield ids, weights
