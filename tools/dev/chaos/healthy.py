"""Clients that ask questions with known answers (see `questions`) during the attacks."""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

from ....runtime.api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from ....runtime.client.client import Client
from .questions import Question
from .served import ServedDemo

JOIN_SECONDS = 10.0
KINDS = ("right", "tied", "strayed", "refused", "wrong", "failed", "lost")


class HealthyClients:
    """`count` threads, each with its own client. `seen` counts their requests by outcome:

      right    the whole answer, word for word
      tied     right up to two tokens that are about equally likely (random weights only)
      strayed  right up to another position (random weights only)
      refused  an error that the engine died, restarts or is full; the client asks again
      wrong    another answer
      failed   another error
      lost     neither answer nor error within `patience` seconds

    `refused_after` has, for each request that was open when a process was killed, the seconds until its client got the
    error. A request sent before the server was back from the previous kill may have waited for a connection.
    """

    def __init__(self, served: ServedDemo, questions: Sequence[Question], count: int, patience: float) -> None:
        self.refused_after: list[float] = []
        self._served, self._patience = served, patience
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        self._questions = questions
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(count)]

    def start(self) -> None:
        """Start to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop to ask, and give open requests a moment."""
        self._stop.set()
        end = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def await_answer(self, seconds: float) -> bool:
        """Wait for a new right answer; return False after the timeout."""
        before, end = self.answered, time.monotonic() + seconds
        while self.answered == before:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    @property
    def answered(self) -> int:
        """Return the number of requests with an acceptable answer."""
        return self.seen["right"] + self.seen["tied"] + self.seen["strayed"]

    def _note(self, what: str, problem: str | None = None) -> None:
        with self._lock:
            self.seen[what] += 1
            if problem is not None:
                self.problems.append(f"{what}: {problem}")

    def _ask(self, seed: int) -> None:
        source = random.Random(seed)
        while not self._stop.is_set():
            try:
                with Client(self._served.address, connect_timeout=5.0) as client:
                    while not self._stop.is_set():
                        self._one(client, source.choice(self._questions))
                        self._stop.wait(source.random() * 0.2)
            except (ServerError, TimeoutError, OSError):
                self._note("refused")
                self._stop.wait(0.5)

    def _one(self, client: Client, question: Question) -> None:
        asked, serves = time.monotonic(), self._served.is_back
        try:
            (output,) = client.generate(
                [question.asked], question.params, adapter=question.adapter, timeout=self._patience
            )
        except EngineDeadError:
            killed = self._served.killed_at
            if serves and killed is not None and asked < killed:
                with self._lock:
                    self.refused_after.append(time.monotonic() - killed)
            raise
        except TimeoutError:
            self._note("lost")
            return
        except OverloadedError as problem:
            self._note("refused")
            self._stop.wait(min(problem.retry_after or 0.5, 5.0))
            return
        except RequestError as problem:
            self._note("failed", f"{question.adapter}: {problem}")
            return
        except ServerError as problem:
            if problem.code != "request_failed":
                raise
            self._note("failed", f"{question.adapter}: {problem}")
            return
        said = output.outputs[0]
        verdict = question.judge(said)
        wrong = f"{question.adapter}: {question.prompt!r} -> {said.text!r} {said.token_ids}"
        self._note(verdict, wrong if verdict == "wrong" else None)
