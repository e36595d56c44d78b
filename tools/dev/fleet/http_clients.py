"""Clients of a fleet under attack: endless streams over HTTP, compared with undisturbed answers."""

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....runtime.demo_model import DEMO_MODEL
from ..chaos.served_gateway import events, exchange

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 17},
    "penalties": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2},
}
TOKENS = 64
ANSWER_SECONDS = 1800.0


@dataclass(frozen=True)
class Question:
    """A question; `whole`: answered at once instead of as a stream."""

    prompt: str
    model: str
    kind: str
    whole: bool


@dataclass
class Seen:
    """Outcomes. `pauses`: the longest seconds between two chunks of each streamed answer."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)


def questions(source: random.Random, count: int, base: str) -> list[Question]:
    """Return questions to all adapters in all kinds; `base`: the base model's name."""
    known = json.loads((Path(DEMO_MODEL) / "prompts.json").read_text(encoding="utf-8"))
    kinds = list(KINDS)
    return [
        Question(entry["prompt"], entry["adapter"] or base, kinds[place % len(kinds)], whole=place % 6 == 5)
        for place, entry in enumerate(source.choices(known, k=count))
    ]


def ask(port: int, question: Question, pauses: list[float] | None = None) -> str:
    """Return the answer's text. Raises OSError, and RuntimeError for another status than 200 or a short answer."""
    body = {"model": question.model, "prompt": question.prompt, "max_tokens": TOKENS, "ignore_eos": True}
    body |= KINDS[question.kind] | {"stream": not question.whole}
    try:
        with exchange(port, "POST", "/v1/completions", body, ANSWER_SECONDS) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {answer.read()[:300]!r}")
            if question.whole:
                return str(json.loads(answer.read())["choices"][0]["text"])
            text, longest, last = "", 0.0, time.monotonic()
            for piece in events(answer):
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                if "error" in piece:
                    raise RuntimeError(str(piece["error"]))
                text += piece["choices"][0]["text"]
    except (http.client.HTTPException, ValueError) as problem:
        raise RuntimeError(repr(problem)) from None
    if pauses is not None:
        pauses.append(longest)
    return text


class Clients:
    """`count` streams at a time until `stop`; `expected`: each question's answer."""

    def __init__(self, port: int, count: int, expected: dict[Question, str], seed: int) -> None:
        self.seen = Seen()
        self._port, self._expected = port, expected
        self._lock, self._over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed + place,)) for place in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send no new questions, and return when the open ones are answered."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        source, asked = random.Random(seed), list(self._expected)
        while not self._over.is_set():
            question, pauses = source.choice(asked), list[float]()
            try:
                text = ask(self._port, question, pauses)
            except (RuntimeError, OSError, ValueError) as problem:
                with self._lock:
                    self.seen.failed.append(f"{question.kind} of {question.model}: {problem!r}")
                time.sleep(0.5)
                continue
            with self._lock:
                self.seen.pauses += pauses
                if text == self._expected[question]:
                    self.seen.right += 1
                else:
                    self.seen.wrong.append(f"{question}: {text!r} instead of {self._expected[question]!r}")
