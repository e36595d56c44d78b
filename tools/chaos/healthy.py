"""Clients that ask the demo model's questions and know the answers, all through the attacks.

The answers are those in the demo model's `prompts.json`: what the model was trained to say, not what this server said
earlier.
"""

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Self

from ...runtime.client.client import Client
from ...runtime.requests.errors import EngineDeadError, OverloadedError, ServerError
from ...runtime.requests.sampling_params import SamplingParams
from .served import ServedDemo

PATIENCE = 60.0
"""Seconds after which a request without an answer and without an error counts as lost."""


class HealthyClients:
    """`count` threads, each with a client of its own. `seen` counts their requests by what became of them:

    right   the whole answer, word for word
    wrong   another answer
    told    an error that says that the engine died, restarts or is full; the client asks again
    lost    neither answer nor error within PATIENCE

    `told_after` has, for each request that was open when a process was killed, the seconds until its client heard so.
    """

    def __init__(self, served: ServedDemo, prompts: Path, count: int) -> None:
        self.told_after: list[float] = []
        self._served = served
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_silence = 0.0
        self._address = served.address
        self._questions = json.loads(prompts.read_text(encoding="utf-8"))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._last_right = time.monotonic()
        self._threads = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(count)]

    def __enter__(self) -> Self:
        self._last_right = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE + 10.0)

    def await_answer(self, seconds: float) -> bool:
        """Wait for a right answer from now on; False if none comes in so long."""
        before, end = self.seen["right"], time.monotonic() + seconds
        while self.seen["right"] == before:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def _note(self, what: str) -> None:
        with self._lock:
            self.seen[what] += 1
            if what == "right":
                now = time.monotonic()
                self.longest_silence = max(self.longest_silence, now - self._last_right)
                self._last_right = now

    def _ask(self, seed: int) -> None:
        source = random.Random(seed)
        params = SamplingParams(temperature=0.0, max_tokens=48)
        while not self._stop.is_set():
            try:
                with Client(self._address, connect_timeout=5.0) as client:
                    while not self._stop.is_set():
                        self._one(client, source.choice(self._questions), params)
                        self._stop.wait(source.random() * 0.2)
            except (ServerError, TimeoutError, OSError):
                self._note("told")
                self._stop.wait(0.5)

    def _one(self, client: Client, question: dict[str, str], params: SamplingParams) -> None:
        asked = time.monotonic()
        try:
            (output,) = client.generate([question["prompt"]], params, adapter=question["adapter"], timeout=PATIENCE)
        except EngineDeadError:
            killed = self._served.killed_at
            if killed is not None and asked < killed:
                with self._lock:
                    self.told_after.append(time.monotonic() - killed)
            raise
        except TimeoutError:
            self._note("lost")
            return
        except OverloadedError as problem:
            self._note("told")
            self._stop.wait(min(problem.retry_after or 0.5, 5.0))
            return
        text = output.outputs[0].text.strip()
        if text == question["answer"]:
            self._note("right")
            return
        with self._lock:
            self.wrong.append(f"{question['adapter']}: {question['prompt']!r} -> {text!r}")
        self._note("wrong")
