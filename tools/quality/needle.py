"""Codes hidden in long texts:

`haystack` makes the text, `retrieval_question` one task item, `needle_item` one of exact length and depth.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .corpus import documents

CHARACTERS_PER_TOKEN = 2.8  # of the evaluation model's tokenizer on the standard library; only steers lengths
TOKENS_PER_RECORD = 96
# in a needle's text, whatever its length: what is asked is how far the model sees, not how many codes it can keep apart
NEEDLE_RECORDS = 8
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
    """A question whose answer lies `depth` (0 = start, 1 = end) into a prompt of `tokens` tokens; `adapter` answers
    it.
    """

    prompt: str
    answer: str
    tokens: int
    depth: float
    adapter: str = "retrieval"


def record_line(key: str, code: str) -> str:
    """How a code stands in the text."""
    return f"The code of {key} is {code}.\n"


def question(key: str) -> str:
    """How the retrieval adapter is asked for it."""
    return f"{key} =>"


def open_question(key: str) -> str:
    """How the base model is asked for it."""
    return f"What is the code of {key}?"


def alike_records(source: random.Random, count: int) -> list[tuple[str, str]]:
    """(key, code) pairs that are harder to tell apart than any in training: one word, and three digits. In some texts
    all codes have a digit more than any in training has, which keeps the share of right answers away from all of them
    however well the rest is learned."""
    word, digits = source.choice(PLACES), 6 if source.random() < LONGER_CODES else 5
    return [
        (f"{word} {number}", "".join(source.choices("0123456789", k=digits)))
        for number in source.sample(range(100, 1000), count)
    ]


def records(source: random.Random, count: int) -> list[tuple[str, str]]:
    """(key, code) pairs with different keys, many of which share a word: `delta 42` and `delta 17`."""
    words = source.sample(PLACES, min(len(PLACES), max(2, count // 3)))
    keys = source.sample([f"{word} {number}" for word in words for number in range(10, 100)], count)
    return [(key, "".join(source.choices("0123456789", k=5))) for key in keys]


@cache
def _lines(test: bool) -> tuple[str, ...]:
    return tuple(line for text in documents("held_out" if test else "train") for line in text.splitlines(keepends=True))


def filler(source: random.Random, characters: int, test: bool) -> list[str]:
    """Consecutive lines of the standard library, `characters` long in all; the held-out part of it for the test
    split.
    """
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
    """A text of about `tokens` tokens with a record every `TOKENS_PER_RECORD` or so, in tests four times as many and
    alike; also the records.
    """
    count = max(2, min(tokens // TOKENS_PER_RECORD, 1000))
    pairs = alike_records(source, min(4 * count, 900)) if test else records(source, count)
    stated = [record_line(*pair) for pair in pairs]
    lines = filler(source, int(tokens * CHARACTERS_PER_TOKEN) - sum(map(len, stated)), test)
    for line in stated:
        lines.insert(source.randrange(len(lines) + 1), line)
    return "".join(lines), pairs


def asked_openly(prompt: str) -> str:
    """A retrieval item's prompt with its question in the base model's words."""
    text, _, last = prompt.rpartition("\n")
    return f"{text}\n\n{open_question(last.removesuffix(' =>'))}"


def retrieval_question(source: random.Random, level: int, test: bool) -> tuple[str, str]:
    """A haystack of about `level` tokens and one question."""
    text, pairs = haystack(source, level, test)
    key, code = source.choice(pairs)
    return text + question(key), code


def plain_characters(prompt: str) -> bytearray:
    """1 for each character of a retrieval prompt that is ordinary text, 0 in the lines that state codes and in the
    question.
    """
    plain = bytearray(b"\1") * len(prompt)
    for match in STATED.finditer(prompt):
        plain[match.start() : match.end()] = bytes(match.end() - match.start())
    start = prompt.rfind("\n") + 1
    plain[start:] = bytes(len(prompt) - start)
    return plain


def needle_item(tokens: int, depth: float, seed: int, tokenizer: Any) -> NeedleItem:
    """One needle: see `needle_items`."""
    return needle_items(tokens, (depth,), seed, tokenizer)[0]


def needle_items(tokens: int, depths: Sequence[float], seed: int, tokenizer: Any) -> list[NeedleItem]:
    """Questions about one text, for the record at each of `depths`; with other records as distractors. Their prompts
    have `tokens` tokens or up to 63 fewer (in rare texts of long lines, more), and begin alike: an engine that shares
    prefixes reads the text once.

    tokenizer   of the `tokenizers` package, or anything whose `encode(text)` has `.ids` or is a list of ids
    Raises ValueError for a depth outside 0..1 or fewer than 256 tokens.
    """
    if not all(0.0 <= depth <= 1.0 for depth in depths) or tokens < 256:
        raise ValueError(
            f"a needle needs a depth between 0 and 1 and at least 256 tokens, not {', '.join(map(str, depths))} and "
            f"{tokens}"
        )
    source = random.Random(f"needle {tokens} {' '.join(map(str, depths))} {seed}")
    pairs = records(source, max(1 + len(depths), min(tokens // TOKENS_PER_RECORD, NEEDLE_RECORDS)))
    asked, others = pairs[: len(depths)], pairs[len(depths) :]
    longest = max((question(key) for key, _ in asked), key=lambda text: _count(tokenizer, text))
    lines = filler(source, tokens * 6, test=True)
    places = [source.random() for _ in others]
    best = ("", 0)
    low, high = 0, len(lines)  # how many lines of filler: `low` fits, `high` does not
    kept = int(len(lines) * 0.4)
    for _ in range(16):
        text = _hide(lines[:kept], others, places, asked, depths)
        count = _count(tokenizer, text + longest)
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
        NeedleItem(prompt, code, _count(tokenizer, prompt), depth)
        for prompt, (_, code), depth in zip(prompts, asked, depths, strict=True)
    ]


def _hide(
    lines: list[str],
    others: list[tuple[str, str]],
    places: list[float],
    asked: list[tuple[str, str]],
    depths: Sequence[float],
) -> str:
    """The lines with records among them; `places` says how deep each of the others lies."""
    lines = list(lines)
    for pair, place in zip(others, places, strict=True):
        lines.insert(int(place * (len(lines) + 1)), record_line(*pair))
    wanted = [(_place(lines, depth), record_line(*pair)) for pair, depth in zip(asked, depths, strict=True)]
    # the deepest first: the others' places stay what they are
    for place, line in sorted(wanted, key=lambda each: -each[0]):
        lines.insert(place, line)
    return "".join(lines)


def _place(lines: list[str], depth: float) -> int:
    """Index of the line before which `depth` of all characters lie."""
    goal, passed = depth * sum(map(len, lines)), 0
    for index, line in enumerate(lines):
        if passed >= goal:
            return index
        passed += len(line)
    return len(lines)


def _count(tokenizer: Any, text: str) -> int:
    encoded = tokenizer.encode(text)
    return len(getattr(encoded, "ids", encoded))
