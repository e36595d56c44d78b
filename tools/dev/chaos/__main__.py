"""`python -m sidestream.tools.dev.chaos --minutes N [--seed S]`: attack a live server; exit code 1 with findings.

The demo model is served in fp32 on the CPU, where answers do not depend on the batch; --shape serves a model with
random weights instead. Rounds of all attacks in random order run until the time, SIGTERM or Ctrl-C ends them; the table
is printed in any case. Findings are: a wrong or lost answer, an unexpected death of a process, an attack that
succeeded, growth, pages that are not freed, tracebacks in the log, and remains after the end.

Arguments after `--` go to `sidestream serve`:

    python -m sidestream.tools.dev.chaos --minutes 9 --shape llama-3.1-8b --adapters 40 --clients 64 --kill-every 1
        --victims gpu -- --max-loras 16 --max-num-seqs 64
"""

import argparse
import itertools
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

from ....runtime.api.errors import ServerError
from ....runtime.client.client import Client
from ...options.engine import add_value, at_least
from ...options.models import SHAPES
from ..command_line import dev_parser
from .attacks import ATTACKS, CHILDREN, Attack, Target
from .healthy import KINDS, HealthyClients
from .lives import Lives
from .questions import prepare, too_many_strays, undisturbed_strays
from .served import ServedDemo, tracebacks_in
from .starts import Starts

START_SECONDS = 600.0
ANSWER_SECONDS = 60.0
CLOSING_SECONDS = 30.0
"""Seconds of the time for the checks after the attacks and the server's end."""
BACK_SECONDS = 10.0
VICTIMS = {"both": CHILDREN, "batcher": ("batcher",), "gpu": ("GPU process",)}


class Ended(BaseException):
    """The run is over; `str` gives the reason. Not an Exception, so that handlers of failures do not catch it."""


class Ending:
    """Raise Ended once in the main thread within the block: at `deadline` (monotonic clock), SIGTERM or SIGINT.

    Later signals are ignored.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for each in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
            self._former[each] = signal.signal(each, self._end)
        signal.setitimer(signal.ITIMER_REAL, max(self._deadline - time.monotonic(), 0.001))
        return self

    def __exit__(self, *problem: object) -> None:
        self.over()
        for each, handler in self._former.items():
            signal.signal(each, handler)

    def over(self) -> None:
        """Raise Ended no more; ignore the signals."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for each in self._former:
            signal.signal(each, signal.SIG_IGN)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.over()
        raise Ended("the time is over" if number == signal.SIGALRM else f"stopped by {signal.Signals(number).name}")


@dataclass
class Line:
    """One attack: attempts, rounds, and problems."""

    name: str
    attempts: int = 0
    rounds: int = 0
    survived: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, attempts: int, surprises: list[str], fault: str | None) -> None:
        """Add a round: `surprises` that the server survived, and those it did not."""
        self.rounds += 1
        self.attempts += attempts
        self.findings += surprises if fault is None else [*surprises, fault]
        self.survived += fault is None


def delays(what: str, seconds: list[float]) -> list[str]:
    """Return one row with median and maximum of `seconds`; none without values."""
    if not seconds:
        return []
    return [f"{what:<44}{len(seconds):>6}{statistics.median(seconds):>10.2f}{max(seconds):>10.2f}"]


def table(
    lines: Mapping[str, Line], seen: Mapping[str, int], findings: Sequence[str], more: Sequence[Sequence[str]] = ()
) -> str:
    """Return the report: attacks, requests of the healthy clients, `more` tables if not empty, and findings."""
    rows = [f"{'attack':<22}{'rounds':>8}{'attempts':>10}{'survived':>10}{'findings':>10}"]
    rows += [
        f"{line.name:<22}{line.rounds:>8}{line.attempts:>10}{line.survived:>10}{len(line.findings):>10}"
        for line in lines.values()
    ]
    rows += ["", f"{'healthy requests':<22}{sum(seen.values()):>8}"]
    rows += [f"  {kind:<20}{seen.get(kind, 0):>8}" for kind in KINDS]
    for part in more:
        rows += ["", *part] if part else []
    rows += ["", "findings:" if findings else "no findings", *(f"  {finding}" for finding in findings)]
    return "\n".join(rows)


@dataclass
class Run:
    """The target, the healthy clients, and the records of a run."""

    lines: dict[str, Line]
    target: Target | None = None
    healthy: HealthyClients | None = None
    lives: Lives = field(default_factory=Lives)
    starts: Starts = field(default_factory=Starts)
    usual_strays: float = 0.0
    findings: list[str] = field(default_factory=list)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's options, and the arguments of `sidestream serve`."""
    parser = dev_parser("chaos", __doc__)
    add_value(parser, "--minutes", 2.0, "how long, all in all", float)
    parser.add_argument("--rounds", type=int, metavar="N", help="end after so many rounds, if the time suffices")
    add_value(parser, "--seed", 0, "draws everything", int)
    add_value(parser, "--clients", 4, "healthy clients")
    about = "seconds after which a request without answer and error counts as lost"
    add_value(parser, "--patience", 60.0, about, float, "S")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a model with random weights (default: the demo model)")
    add_value(parser, "--adapters", 0, "random adapters", at_least(0))
    add_value(parser, "--rank", 16, "of the random adapters")
    about = "attacks that kill come so long after the last kill (default: each once in every round)"
    parser.add_argument("--kill-every", type=float, default=0.0, metavar="MINUTES", help=about)
    add_value(parser, "--victims", "both", "which processes are killed", str, None, choices=VICTIMS)
    names = [attack.name for attack in ATTACKS]
    parser.add_argument("--only", nargs="+", metavar="ATTACK", choices=names, default=names, help="these attacks alone")
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    return parser.parse_args(given[:end]), given[end + 1 :]


def order(chosen: Sequence[Attack], source: random.Random, served: ServedDemo, every: float) -> Iterator[Attack | None]:
    """Yield attacks without end in rounds of random order, with None after each round.

    `every` > 0: attacks that kill are not in the rounds but come in turn, so many seconds after the last kill or the
    start.
    """
    killing = [attack for attack in chosen if attack.kills and every]
    others = [attack for attack in chosen if attack not in killing]
    turns = itertools.cycle(source.sample(killing, len(killing)))
    while True:
        for attack in source.sample(others, len(others)):
            yield attack
            if killing and served.undisturbed >= every:
                yield next(turns)
        if not others:
            time.sleep(max(0.0, every - served.undisturbed))
            yield next(turns)
        yield None


def attack_once(attack: Attack, target: Target, source: random.Random, healthy: HealthyClients, run: Run) -> None:
    """Run one attack; afterwards the server must answer a healthy client with the same processes."""
    before, outages = target.served.processes(), len(target.served.outages)
    attempts, surprises, fault = 0, list[str](), None
    try:
        attempts, surprises = attack.run(target, source)
        target.served.wait()
        after = target.served.processes()
        if not attack.kills and before != after:
            fault = f"processes died: {sorted(before.keys() - after.keys()) or 'and were started again'}"
        elif len(target.served.outages) > outages:
            run.starts.began(target.served, target.served.outages[-1])
        if fault is None and not healthy.await_answer(ANSWER_SECONDS):
            fault = f"no healthy client was answered within {ANSWER_SECONDS:g} s afterwards"
    except (TimeoutError, ServerError) as problem:
        fault = str(problem)
    run.lines[attack.name].add(attempts, surprises, fault)


def attack_on(run: Run, options: argparse.Namespace, arguments: list[str], folder: Path, running: ExitStack) -> None:
    """Serve, measure the answers, and attack for `--rounds` rounds or until Ended; `running` stops the server."""
    source = random.Random(options.seed)
    subject = prepare(folder, options.shape, options.adapters, options.rank)
    served = running.enter_context(ServedDemo(folder, *subject.arguments, *arguments))
    run.target = target = Target(served, subject.honest_adapter, VICTIMS[options.victims])
    seconds = served.wait(START_SECONDS)
    print(f"served after {seconds:.1f} s; {served.said('ready in')}", flush=True)
    run.starts.began(served, seconds)
    with Client(served.address) as client:
        questions = subject.questions(client, source)
        run.usual_strays = undisturbed_strays(client, questions, options.clients, source)
    answers = {question.tokens or question.text for question in questions}
    print(
        f"{len(questions)} questions with {len(answers)} different answers; strayed: {run.usual_strays:.1%}", flush=True
    )
    run.healthy = healthy = HealthyClients(served, questions, options.clients, options.patience)
    healthy.start()
    chosen = [attack for attack in ATTACKS if attack.name in run.lines]
    rounds = 0
    for attack in order(chosen, source, served, options.kill_every * 60):
        if attack is None:
            rounds += 1
            served.wait()
            if rounds == options.rounds or not served.alive:
                return
            continue
        started = time.monotonic()
        attack_once(attack, target, source, healthy, run)
        run.lives.look(time.monotonic(), rounds, served.processes())
        run.starts.look()
        print(f"{attack.name:<22}{time.monotonic() - started:6.1f} s  {dict(healthy.seen)}", flush=True)


def pages_used_when_idle(address: str, seconds: float) -> int:
    """Return KV pages of requests that are no longer open, after at most so many seconds."""
    end = time.monotonic() + seconds
    with Client(address) as client:
        while True:
            stats = client.stats()
            if not stats["requests_open"] or time.monotonic() > end:
                return int(stats["pages_in_use"])
            time.sleep(0.2)


def close(run: Run) -> None:
    """Stop everything, and check the remains."""
    if run.healthy is not None:
        run.healthy.stop()
        run.findings += run.healthy.problems[:8]
        run.findings += [f"{run.healthy.seen['lost']} requests were lost"] if run.healthy.seen["lost"] else []
        strays = too_many_strays(run.healthy.seen, run.usual_strays)
        run.findings += [] if strays is None else [strays]
    if run.healthy is None or not run.healthy.answered:
        run.findings.append("no healthy client was ever answered")
    if run.target is None:
        return
    served = run.target.served
    try:
        served.wait(BACK_SECONDS)
        used = pages_used_when_idle(served.address, BACK_SECONDS)
        run.findings += [f"{used} KV pages stay taken"] if used else []
    except (TimeoutError, ServerError) as problem:
        if served.undisturbed > ANSWER_SECONDS:
            run.findings.append(str(problem))
        else:
            print(f"KV pages are not looked at, for the server is starting again: {problem}")
    run.findings += [f"left after the end: {thing}" for thing in served.stop()]
    run.findings += [f"a traceback in the log: {text}" for text in dict.fromkeys(tracebacks_in(served.log))]


def report(run: Run, findings: list[str]) -> str:
    """Return the table of the run."""
    seconds = run.healthy.refused_after if run.healthy is not None else []
    timed = delays("a process was killed; its clients got an error", seconds)
    timed += delays("a process was killed; served again", run.target.served.outages if run.target is not None else [])
    timed = [f"{'':<44}{'times':>6}{'median s':>10}{'longest s':>10}", *timed] if timed else []
    seen = run.healthy.seen if run.healthy is not None else {}
    return table(run.lines, seen, findings, [run.lives.table(), run.starts.table(), timed])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chaos test; return 0 without findings, else 1."""
    started = time.monotonic()
    options, for_server = parse(sys.argv[1:] if arguments is None else arguments)
    chosen = [attack.name for attack in ATTACKS if attack.name in options.only]
    run = Run({name: Line(name) for name in chosen})
    with Ending(started + options.minutes * 60 - CLOSING_SECONDS) as ending, ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        try:
            attack_on(run, options, for_server, folder, running)
        except Ended as ended:
            print(f"{ended}, after {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
        except (TimeoutError, ServerError) as problem:
            run.findings.append(str(problem))
        ending.over()
        close(run)
    findings = [f"{line.name}: {each}" for line in run.lines.values() for each in dict.fromkeys(line.findings)]
    findings += run.findings + run.lives.findings() + run.starts.findings()
    print(report(run, findings), flush=True)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
