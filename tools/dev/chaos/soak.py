"""`python -m sidestream.tools.dev.chaos.soak --minutes N`: memory of a gateway and two engines under steady traffic.

Nothing is attacked. Clients send requests with known adapters to the gateway, one after another. The resident memory of
each process is printed every 30 seconds. Exit code 1 if one grew by 1% or more after the warm-up, or a request failed.
"""

import argparse
import contextlib
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from ....runtime.demo_model import DEMO_MODEL
from .lives import MOST_GROWTH, WARM_UP_SECONDS, WINDOW_SECONDS, Life, Lives
from .questions import DEMO_FLAGS
from .served import Holdings, ServedDemo, descendants
from .served_gateway import ServedGateway, exchange

LOOK_SECONDS = 30.0
REQUEST_SECONDS = 60.0
START_SECONDS = 300.0
LONGEST_PAUSE = 0.4  # seconds between two requests of a client


class Clients:
    """Threads that ask questions of the demo model; `failures` has what went wrong."""

    def __init__(self, gateway: ServedGateway, count: int) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._gateway = gateway
        self._questions = json.loads((Path(DEMO_MODEL) / "prompts.json").read_text(encoding="utf-8"))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS)

    def _ask(self, seed: int) -> None:
        source = random.Random(seed)
        while not self._stop.wait(source.uniform(0.0, LONGEST_PAUSE)):
            question = source.choice(self._questions)
            body: dict[str, Any] = {"max_tokens": 32, "stream": source.random() < 0.5}
            body |= {"model": question["adapter"]} if question["adapter"] else {}
            if source.random() < 0.5:
                path, body["prompt"] = "/v1/completions", question["prompt"]
            else:
                path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": question["prompt"]}]
            try:
                with exchange(self._gateway.port, "POST", path, body, REQUEST_SECONDS) as response:
                    response.read()
                    outcome = str(response.status)
            except (OSError, http.client.HTTPException) as error:
                outcome = repr(error)
            with self._lock:
                self.answers += outcome == "200"
                self.failures += [] if outcome == "200" else [f"{path} {body}: {outcome}"]


def growth(life: Life) -> float:
    """Return the growth of a process's memory from the window after the warm-up to the last one."""
    return life.late().memory / life.early().memory - 1


def run(minutes: float, clients: int, folder: Path) -> list[str]:
    """Serve for so many minutes and return findings."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(ServedDemo(folder / str(place), *DEMO_FLAGS)) for place in range(2)]
        for engine in engines:
            engine.wait()
        gateway = stack.enter_context(ServedGateway(folder / "gateway", [engine.address for engine in engines]))
        gateway.wait(len(engines), START_SECONDS)
        asking = stack.enter_context(Clients(gateway, clients))
        lives, started = Lives(), time.monotonic()
        end = started + 60 * minutes
        while (now := time.monotonic()) < end and gateway.process.poll() is None:
            below = enumerate(descendants(gateway.process.pid))
            processes = {f"gateway {place}" if place else "gateway": pid for place, pid in below}
            for place, engine in enumerate(engines):
                processes |= {f"{role} {place}": pid for role, pid in engine.processes().items()}
            lives.look(now, 0, processes)
            held = {name: Holdings.of(pid) for name, pid in processes.items()}
            memory = ", ".join(f"{name} {each.memory / 2**20:.1f}" for name, each in held.items() if each is not None)
            print(f"{now - started:6.0f} s  {asking.answers} answers  MiB: {memory}", flush=True)
            time.sleep(max(0.0, min(LOOK_SECONDS, end - time.monotonic())))
        print("\n".join(["", *lives.table()]))
        return findings_of(lives, asking.failures, gateway.process.poll())


def findings_of(lives: Lives, failures: list[str], gateway_code: int | None) -> list[str]:
    """Return what went wrong. Growth is judged only in processes that lived long enough."""
    findings = [f"{len(failures)} requests failed: {failures[0]}"] if failures else []
    if gateway_code is not None:
        findings.append(f"the gateway ended with exit code {gateway_code}")
    old = [life for life in lives if life.is_old]
    if not old:
        print("growth is not judged: the run was too short")
    return findings + [f"{life.role}: grew by {growth(life):.2%}" for life in old if growth(life) >= MOST_GROWTH]


def main(arguments: list[str] | None = None) -> int:
    """Return 1 with findings."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.dev.chaos.soak", description=__doc__)
    least = (WARM_UP_SECONDS + 2 * WINDOW_SECONDS) / 60
    parser.add_argument("--minutes", type=float, default=least + 1, metavar="N", help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="default: %(default)s")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="sss-") as folder:
        findings = run(options.minutes, options.clients, Path(folder))
    print("\n".join(["findings:", *findings]) if findings else "no process grew by 1%, no request failed")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
