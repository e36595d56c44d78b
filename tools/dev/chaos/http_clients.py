"""Clients of a gateway: endless requests over HTTP, whose answers are compared with earlier ones."""

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ...options.engine import demo_prompts
from .served_gateway import events, exchange

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 17},
    "penalties": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2},
}
TOKENS = 64
ANSWER_SECONDS = 1800.0


@dataclass(frozen=True)
class Question:
    """A question; `whole`: answered at once instead of as a stream; `chat`: asked as a message."""

    prompt: str
    model: str
    kind: str
    whole: bool
    chat: bool = False


@dataclass
class Seen:
    """Outcomes. `pauses`: the longest seconds between two chunks of each streamed answer."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)


def questions(source: random.Random, count: int, base: str) -> list[Question]:
    """Return questions to all adapters in all kinds; `base`: the base model's name."""
    kinds = list(KINDS)
    return [
        Question(str(entry["prompt"]), entry["adapter"] or base, kinds[place % len(kinds)], whole=place % 6 == 5)
        for place, entry in enumerate(source.choices(demo_prompts(), k=count))
    ]


def ask(port: int, question: Question, pauses: list[float] | None = None, seconds: float = ANSWER_SECONDS) -> str:
    """Return the answer's text. Raises OSError, and RuntimeError for another status than 200 or a short answer."""
    body = {"model": question.model, "max_tokens": TOKENS, "ignore_eos": True, "stream": not question.whole}
    body |= KINDS[question.kind]
    if question.chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": question.prompt}]
    else:
        path, body["prompt"] = "/v1/completions", question.prompt
    try:
        with exchange(port, "POST", path, body, seconds) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {answer.read()[:300]!r}")
            if question.whole:
                return _text(json.loads(answer.read())["choices"][0])
            text, longest, last = "", 0.0, time.monotonic()
            for piece in events(answer):
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                if "error" in piece:
                    raise RuntimeError(str(piece["error"]))
                text += _text(piece["choices"][0])
    except (http.client.HTTPException, ValueError) as problem:
        raise RuntimeError(repr(problem)) from None
    if pauses is not None:
        pauses.append(longest)
    return text


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a choice of a completion, a chat, or an event of either."""
    said = choice if "text" in choice else choice.get("message") or choice["delta"]
    return str(said.get("text") or said.get("content") or "")


def answers(port: int, asked: Sequence[Question], at_once: int) -> dict[Question, str]:
    """Return the answer of each question. Raises the errors of `ask`."""
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(asked, pool.map(lambda question: ask(port, question), asked), strict=True))


class Clients:
    """`count` requests at a time until `stop`; `expected`: each question's answer.

    pause    longest random pause before a request, in seconds
    seconds  limit of an answer
    """

    def __init__(
        self,
        port: int,
        count: int,
        expected: dict[Question, str],
        seed: int,
        pause: float = 0.0,
        seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.seen = Seen()
        self._port, self._expected, self._pause, self._seconds = port, expected, pause, seconds
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
        while not self._over.wait(source.uniform(0.0, self._pause)):
            question, pauses = source.choice(asked), list[float]()
            try:
                text = ask(self._port, question, pauses, self._seconds)
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
