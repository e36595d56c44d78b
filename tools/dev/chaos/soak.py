"""`python -m sidestream.tools.dev.chaos.soak --minutes N`: memory of a gateway and two engines under steady traffic.

Nothing is attacked. Clients send requests with known answers to the gateway, one after another. The resident memory of
each process is printed every 30 seconds. Exit code 1 if one grew by 1% or more after the warm-up, or a request failed
or got another answer.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from .http_clients import Clients, answers, questions
from .lives import MOST_GROWTH, WARM_UP_SECONDS, WINDOW_SECONDS, Lives
from .questions import DEMO_FLAGS
from .served import Holdings, ServedDemo, descendants
from .served_gateway import ServedGateway

LOOK_SECONDS = 30.0
REQUEST_SECONDS = 60.0
START_SECONDS = 300.0
QUESTIONS = 6  # as completions and as chats
LONGEST_PAUSE = 0.4  # seconds between two requests of a client


def run(minutes: float, clients: int, folder: Path) -> list[str]:
    """Serve for so many minutes and return findings."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(ServedDemo(folder / str(place), *DEMO_FLAGS)) for place in range(2)]
        for engine in engines:
            engine.wait()
        gateway = stack.enter_context(ServedGateway(folder / "gateway", [engine.address for engine in engines]))
        gateway.wait(len(engines), START_SECONDS)
        asked = questions(random.Random(0), QUESTIONS, "demo_model")
        expected = answers(gateway.port, [*asked, *(replace(each, chat=True) for each in asked)], clients)
        asking = Clients(gateway.port, clients, expected, 0, LONGEST_PAUSE, REQUEST_SECONDS)
        stack.callback(asking.stop)
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
            print(f"{now - started:6.0f} s  {asking.seen.right} answers  MiB: {memory}", flush=True)
            time.sleep(max(0.0, min(LOOK_SECONDS, end - time.monotonic())))
        print("\n".join(["", *lives.table()]))
        return findings_of(lives, asking.seen.failed + asking.seen.wrong, gateway.process.poll())


def findings_of(lives: Lives, failures: list[str], gateway_code: int | None) -> list[str]:
    """Return what went wrong. Growth is judged only in processes that lived long enough."""
    findings = [f"{len(failures)} requests failed: {failures[0]}"] if failures else []
    if gateway_code is not None:
        findings.append(f"the gateway ended with exit code {gateway_code}")
    old = [life for life in lives if life.is_old]
    if not old:
        print("growth is not judged: the run was too short")
    return findings + [f"{life.role}: grew by {life.growth:.2%}" for life in old if life.growth >= MOST_GROWTH]


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
