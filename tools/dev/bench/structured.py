"""Time constraints on the CPU: `python -m sidestream.tools.dev.bench.structured MODEL`.

MODEL is a directory with a tokenizer and a config.json (default: the demo model). It prints the time from a schema of
50 kB to its first mask, wall-clock and CPU, and the time of a step's masks for batches of running answers, without
drafts and with drafts that fit the grammar.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from ....runtime.api.structured_outputs import StructuredOutputsParams
from ....runtime.demo_model import DEMO_MODEL
from ....runtime.scheduler.step_plan import Int32
from ....runtime.text.generation_config import eos_token_ids
from ....runtime.text.structured.draft_masks import fill_drafted
from ....runtime.text.structured.grammar_compiler import GrammarCompiler
from ....runtime.text.structured.mask_filling import FEW, consume_outputs, fill_masks, fill_threads
from ....runtime.text.structured.matcher import Matcher
from ....runtime.text.tokenizer import load_tokenizer

SCHEMA_BYTES = 50_000
REPEATS = 9
STEPS = 50
DRAFTED = ((1, 7), (8, 7), (64, 3))
"""Answers of a step, and drafts of each."""


def big_schema(number: int) -> dict[str, Any]:
    """Return a schema of 50 kB: objects of required texts, numbers and enumerations, with names by number."""
    schema: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    while len(json.dumps(schema)) < SCHEMA_BYTES:
        name = f"part_{number}_{len(schema['required'])}"
        fields: dict[str, Any] = {
            "title": {"type": "string", "maxLength": 80},
            "count": {"type": "integer", "minimum": 0, "maximum": 1000},
            "state": {"enum": ["open", "closed", "unknown", None]},
            "tags": {"type": "array", "items": {"type": "string"}},
        }
        schema["properties"][name] = {"type": "object", "properties": fields, "required": list(fields)}
        schema["required"].append(name)
    return schema


def step(matchers: list[Matcher], outputs: list[list[int]], ends: set[int], chance: random.Random) -> float:
    """Return seconds of one step's masks; then each answer gets a token that its mask allows, or restarts."""
    begin = time.perf_counter()
    consume_outputs(matchers, [(output, 0) for output in outputs], in_parallel=len(matchers) > FEW)
    masks = fill_masks(matchers)
    seconds = time.perf_counter() - begin
    for row, mask in enumerate(masks):
        token = chance.choice(allowed(mask))
        if token in ends:
            matchers[row], outputs[row] = matchers[row].grammar.matcher(), []
        else:
            outputs[row].append(token)
    return seconds


def guess(matcher: Matcher, count: int, chance: random.Random) -> list[int]:
    """Return tokens in a row that are allowed and do not end the answer."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(chance.choice(allowed(fill_masks([matcher])[0])))
        if tokens[-1] in matcher.grammar.eos_ids or not matcher.try_draft(tokens[-1]):
            break
    matcher.rollback()
    return tokens


def allowed(mask: Int32) -> list[int]:
    """Return the tokens of a mask."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def drafted_step(matchers: list[Matcher], count: int, chance: random.Random) -> tuple[float, float]:
    """Return seconds of the masks of one step with drafts, and the share that was made in time."""
    drafts = [guess(matcher, count, chance) for matcher in matchers]
    begin = time.perf_counter()
    _, _, words = fill_drafted(matchers, drafts, all_go_on)
    seconds = time.perf_counter() - begin
    return seconds, len(words) / (len(matchers) + sum(map(len, drafts)))


def all_go_on(matchers: list[int], _place: int, _words: Int32) -> list[bool]:
    """Return a state with the grammar only."""
    return [True] * len(matchers)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.dev.bench.structured", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=Path(DEMO_MODEL))
    model = parser.parse_args().model
    tokenizer = load_tokenizer(model)
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    compiler = GrammarCompiler(tokenizer, vocabulary, eos_token_ids(model))
    begin = time.perf_counter()
    compiler.prepare()
    print(f"{vocabulary} tokens read in {time.perf_counter() - begin:.3f} s, once at the start")
    firsts, computed = [], []
    for number in range(REPEATS):
        text = json.dumps(big_schema(number))
        begin, used = time.perf_counter(), time.thread_time()
        fill_masks([compiler.compile(StructuredOutputsParams(json=text)).matcher()])
        firsts.append(1e3 * (time.perf_counter() - begin))
        computed.append(1e3 * (time.thread_time() - used))
    print(f"schema of {len(text)} bytes to its first mask: median {statistics.median(firsts):.1f} ms of {REPEATS}")
    print(f"  of processor time: median {statistics.median(computed):.1f} ms, at best {min(computed):.1f} ms")
    grammar = compiler.compile(StructuredOutputsParams(json=big_schema(0)))
    while grammar.lexers < fill_threads():  # like a constraint that is used again and again
        grammar.add_lexer()
    print(f"masks are filled by {fill_threads()} threads where there are more than {FEW}")
    ends, chance = set(grammar.eos_ids), random.Random(0)
    for count in (1, 8, 64, 256):
        matchers, outputs = [grammar.matcher() for _ in range(count)], [[] for _ in range(count)]  # type: ignore[var-annotated]
        seconds = [step(matchers, outputs, ends, chance) for _ in range(STEPS)]
        print(f"masks of a step of {count:3} answers: median {1e3 * statistics.median(seconds[5:]):.3f} ms")
    for count, drafts in DRAFTED:
        matchers, outputs = [grammar.matcher() for _ in range(count)], [[] for _ in range(count)]
        for _ in range(STEPS):
            step(matchers, outputs, ends, chance)
        found = [drafted_step(matchers, drafts, chance) for _ in range(STEPS)]
        median, made = statistics.median(took for took, _ in found), statistics.mean(share for _, share in found)
        print(
            f"  of {count:3} with {drafts} drafts each: median {1e3 * median:.3f} ms, {made:.0%} of them made in time"
        )
    compiler.close()


if __name__ == "__main__":
    main()
