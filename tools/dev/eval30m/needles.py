"""Codes hidden in long texts: `haystack` makes a text, `retrieval_question` a task item, `needle_items` questions of
exact length and depth.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from ...eval.corpus import documents

CHARACTERS_PER_TOKEN = 2.8  # of the evaluation model's tokenizer on the standard library; only steers lengths
TOKENS_PER_RECORD = 96
NEEDLE_RECORDS = 8  # in a needle's text of any length: needles test distance, not the number of codes
STATED = re.compile(r"^The code of \w+ \d+ is \d+\.\n", re.MULTILINE)
LONGER_CODES = 0.15
_PLACES = (
    "anchor amber basin bridge canyon cedar copper delta ember falcon forest garnet glacier harbor hazel island "
    "ivory jasmine juniper kernel "
    "lagoon lantern marble meadow nectar oasis orchard pebble prairie quarry raven ridge saddle summit timber "
    "tundra valley velvet willow zephyr"
)
PLACES = _PLACES.split()


@dataclass(frozen=True)
class NeedleItem:
    """A question with its answer at `depth` (0: start, 1: end) of a prompt of `tokens` tokens."""

    prompt: str
    answer: str
    tokens: int
    depth: float


def record_line(key: str, code: str) -> str:
    """Return the line that states a code."""
    return f"The code of {key} is {code}.\n"


def question(key: str) -> str:
    """Return the question for the retrieval adapter."""
    return f"{key} =>"


def open_question(key: str) -> str:
    """Return the question for the base model."""
    return f"What is the code of {key}?"


def alike_records(source: random.Random, count: int) -> list[tuple[str, str]]:
    """Return (key, code) pairs that are more alike than in training: one word, and three digits.

    In some texts all codes are a digit longer than in training, so that never all answers are right.
    """
    word, digits = source.choice(PLACES), 6 if source.random() < LONGER_CODES else 5
    return [
        (f"{word} {number}", "".join(source.choices("0123456789", k=digits)))
        for number in source.sample(range(100, 1000), count)
    ]


def records(source: random.Random, count: int) -> list[tuple[str, str]]:
    """Return (key, code) pairs; many keys share a word: `delta 42` and `delta 17`."""
    words = source.sample(PLACES, min(len(PLACES), max(2, count // 3)))
    keys = source.sample([f"{word} {number}" for word in words for number in range(10, 100)], count)
    return [(key, "".join(source.choices("0123456789", k=5))) for key in keys]


@cache
def _lines(test: bool) -> tuple[str, ...]:
    return tuple(line for text in documents("held_out" if test else "train") for line in text.splitlines(keepends=True))


def filler(source: random.Random, characters: int, test: bool) -> list[str]:
    """Return consecutive lines of the standard library of so many characters; held-out files for the test split."""
    lines = _lines(test)
    chosen: list[str] = []
    while characters > 0:
        start = source.randrange(len(lines))
        for line in lines[start : start + 200]:
            chosen.append(line if line.endswith("\n") else line + "\n")
            characters -= len(line)
            if characters <= 0:
                break
    return chosen


def haystack(source: random.Random, tokens: int, test: bool) -> tuple[str, list[tuple[str, str]]]:
    """Return a text of about `tokens` tokens and its records, one in about TOKENS_PER_RECORD tokens.

    A test has four times as many, which are alike.
    """
    count = max(2, min(tokens // TOKENS_PER_RECORD, 1000))
    pairs = alike_records(source, min(4 * count, 900)) if test else records(source, count)
    stated = [record_line(*pair) for pair in pairs]
    lines = filler(source, int(tokens * CHARACTERS_PER_TOKEN) - sum(map(len, stated)), test)
    for line in stated:
        lines.insert(source.randrange(len(lines) + 1), line)
    return "".join(lines), pairs


def asked_openly(prompt: str) -> str:
    """Return a retrieval prompt with its question in the words of the base model."""
    text, _, last = prompt.rpartition("\n")
    return f"{text}\n\n{open_question(last.removesuffix(' =>'))}"


def retrieval_question(source: random.Random, level: int, test: bool) -> tuple[str, str]:
    """Return a haystack of about `level` tokens with one question, and the answer."""
    text, pairs = haystack(source, level, test)
    key, code = source.choice(pairs)
    return text + question(key), code


def plain_characters(prompt: str) -> bytearray:
    """Return 1 for each character of ordinary text, 0 in lines that state codes and in the question."""
    plain = bytearray(b"\1") * len(prompt)
    for match in STATED.finditer(prompt):
        plain[match.start() : match.end()] = bytes(match.end() - match.start())
    start = prompt.rfind("\n") + 1
    plain[start:] = bytes(len(prompt) - start)
    return plain


def needle_items(
    tokens: int, depths: Sequence[float], seed: int, encode: Callable[[str], Sequence[int]]
) -> list[NeedleItem]:
    """Return one question for the record at each of `depths` of one text; other records are distractors.

    Prompts share their text as a prefix, and have `tokens` tokens or up to 63 fewer (rarely more than that). Raises
    ValueError for a depth outside 0..1 or fewer than 256 tokens.
    """
    if not all(0.0 <= depth <= 1.0 for depth in depths) or tokens < 256:
        raise ValueError(
            f"a needle needs a depth between 0 and 1 and at least 256 tokens, not {', '.join(map(str, depths))} and "
            f"{tokens}"
        )
    source = random.Random(f"needle {tokens} {' '.join(map(str, depths))} {seed}")
    pairs = records(source, max(1 + len(depths), min(tokens // TOKENS_PER_RECORD, NEEDLE_RECORDS)))
    asked, others = pairs[: len(depths)], pairs[len(depths) :]
    longest = max((question(key) for key, _ in asked), key=lambda text: len(encode(text)))
    lines = filler(source, tokens * 6, test=True)
    places = [source.random() for _ in others]
    best = ("", 0)
    low, high = 0, len(lines)  # how many lines of filler: `low` fits, `high` does not
    kept = int(len(lines) * 0.4)
    for _ in range(16):
        text = _hide(lines[:kept], others, places, asked, depths)
        count = len(encode(text + longest))
        if count <= tokens:
            low, best = kept, max(best, (text, count), key=lambda pair: pair[1])
        else:
            high = kept
        if high - low <= 1 or 0 <= tokens - count < 64:
            break
        kept = min(max(kept * tokens // count, low + 1), high - 1)
    text, _ = best
    if not text:
        raise ValueError(
            f"a needle of {tokens} tokens has no room for its records with this tokenizer: ask for more tokens"
        )
    prompts = [text + question(key) for key, _ in asked]
    return [
        NeedleItem(prompt, code, len(encode(prompt)), depth)
        for prompt, (_, code), depth in zip(prompts, asked, depths, strict=True)
    ]


def _hide(
    lines: list[str],
    others: list[tuple[str, str]],
    places: list[float],
    asked: list[tuple[str, str]],
    depths: Sequence[float],
) -> str:
    """Return the lines with records inserted, the others at `places` (0 to 1)."""
    lines = list(lines)
    for pair, place in zip(others, places, strict=True):
        lines.insert(int(place * (len(lines) + 1)), record_line(*pair))
    wanted = [(_place(lines, depth), record_line(*pair)) for pair, depth in zip(asked, depths, strict=True)]
    # the deepest first, so that the indices of the others stay valid
    for place, line in sorted(wanted, key=lambda each: -each[0]):
        lines.insert(place, line)
    return "".join(lines)


def _place(lines: list[str], depth: float) -> int:
    """Return the index of the line at `depth` of all characters."""
    goal, passed = depth * sum(map(len, lines)), 0
    for index, line in enumerate(lines):
        if passed >= goal:
            return index
        passed += len(line)
    return len(lines)
