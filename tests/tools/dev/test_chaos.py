"""The chaos harness sees what it is there to see: a round against a live server, and findings where there are some."""

import argparse
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sidestream.runtime.api.outputs import CompletionOutput
from sidestream.runtime.protocol import framing
from sidestream.tools.bench.random_model import TINY
from sidestream.tools.commands import serve
from sidestream.tools.dev.chaos import frames
from sidestream.tools.dev.chaos.__main__ import Ended, Ending, Line, main, order, table
from sidestream.tools.dev.chaos.attacks import ATTACKS, damage
from sidestream.tools.dev.chaos.lives import Life, Lives, grown
from sidestream.tools.dev.chaos.questions import Question, prepare, too_many_strays, undisturbed_strays
from sidestream.tools.dev.chaos.served import Holdings
from sidestream.tools.dev.chaos.starts import Start, Starts, device_mib
from sidestream.tools.options.models import SHAPES


def test_a_round_of_harmless_attacks_finds_nothing(
    capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--exhaustive"):
        pytest.skip("two minutes of all attacks are in every run; run with --exhaustive")
    attacks = ["hostile frames", "half greetings", "killed process"]
    code = main(["--minutes", "10", "--rounds", "1", "--adapters", "3", "--clients", "2", "--only", *attacks])
    told = capsys.readouterr().out
    assert code == 0 and "no findings" in told, told
    assert "hostile frames               1     10000         1         0" in told
    assert re.search(r"(\d+) questions with \1 different", told)
    assert re.search(r"a process was killed; served again +1 ", told), told
    assert re.search(r"^1 .*no GPU\n2 .*no GPU$", told, re.MULTILINE), told


def test_the_same_seed_gives_the_same_frames_and_most_are_refused() -> None:
    made = [list(frames.frames(random.Random(seed), 500, bytes(16))) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    refused = 0
    for frame in made[0]:
        try:
            framing.decode_from_client(frame)
        except framing.FrameError:
            refused += 1
    assert 250 < refused < 500, "some get through to the server's own checks"


def test_findings_are_told_by_attack() -> None:
    line = Line("hang-ups")
    line.add(4, [], None)
    line.add(4, ["quoted a file"], "processes died")
    assert (line.rounds, line.attempts, line.survived) == (2, 8, 1)
    told = table({"hang-ups": line}, {"right": 3, "wrong": 1}, ["hang-ups: processes died"], [["a row"], []])
    assert re.search(r"hang-ups +2 +8 +1 +2\n", told)
    assert told.endswith("\n\na row\n\nfindings:\n  hang-ups: processes died") and "no findings" not in told


MIB = 1 << 20


def made_up(memory: Callable[[int, int], float], rounds: int, round_seconds: float = 60.0) -> Life:
    """A batcher's life with four looks in each round; `memory(round, look)`: MiB."""
    looks = [
        ((number + place / 4) * round_seconds, number, Holdings(int(memory(number, place) * MIB), 20, 5))
        for number in range(rounds)
        for place in range(4)
    ]
    return Life("batcher", 0.0, looks)


def test_a_leak_in_each_round_is_found_however_short_the_rounds_and_whatever_else_goes_on() -> None:
    """One attack of each round leaks 2 MiB; a look may fall into a moment in which a prompt takes 250 MiB."""
    source = random.Random(0)
    peaks = [source.choice((0, 0, 250)) for _ in range(400)]

    def leaks(number: int, place: int) -> float:
        return 300 + 2 * (number + (place > 1)) + (peaks[4 * number + place] if place else 0)

    assert grown(made_up(leaks, 10, round_seconds=10.0)) == ["batcher: keeps 2.0 MiB more with each round"]
    assert grown(made_up(leaks, 4, round_seconds=10.0)) == [], "four rounds may be a warm-up"
    assert grown(made_up(lambda number, place: leaks(0, place), 40)) == [], "peaks alone are no growth"


def test_what_fills_up_once_is_no_growth() -> None:
    def fills(number: int, place: int) -> float:
        return 300 + 30 * min(number, 3) + 40 * (number > 8)

    assert grown(made_up(fills, 12, round_seconds=10.0)) == []
    assert grown(made_up(fills, 40)) == [], "all of it within ten minutes"


def test_a_slow_leak_is_found_in_an_old_life() -> None:
    """6 MiB of 404 in the ten minutes between the windows, too little to be seen in a round."""

    def slow(number: int, place: int) -> float:
        return 400 + 0.4 * number + 100 * (place == 2)

    assert grown(made_up(slow, 31)) == ["batcher: 404 MiB after ten minutes grew to 410 MiB"]
    assert grown(made_up(slow, 19)) == [], "its last five minutes are not yet apart from those after the warm-up"
    assert grown(made_up(lambda number, place: 400 + 0.1 * number, 31)) == []


def test_files_and_threads_that_stay_are_found() -> None:
    life = made_up(lambda number, place: 100.0, 31)
    life.looks[80:] = [(age, number, Holdings(held.memory, 40, 30)) for age, number, held in life.looks[80:]]
    assert grown(life) == ["batcher: 20 open files grew to 40", "batcher: 5 threads grew to 30"]


def test_a_process_is_looked_at_for_what_it_keeps() -> None:
    """This process keeps 64 MiB in each of nine rounds."""
    lives, mine, blocks = Lives(), {"supervisor": os.getpid()}, []
    for number in range(9):
        blocks.append(b"x" * (64 << 20))
        lives.look(number * 5.0, number, mine)
        assert bool(lives.findings()) == (number >= 7)
    assert re.search(r"supervisor: keeps 6\d\.\d MiB more", lives.findings()[0])
    assert lives.table()[1].split()[:3] == ["supervisor", "0.7", "9"]


def test_a_measured_answer_may_only_be_left_where_two_tokens_are_as_likely() -> None:
    likely = {5: -1.0, 6: -1.2, 7: -1.5}
    question = Question((1, 2), "a", tokens=(5, 5, 5), likeliest=(likely,) * 3)

    def judge(*tokens: int) -> str:
        return question.judge(CompletionOutput(0, token_ids=list(tokens)))

    assert judge(5, 5, 5) == "right"
    assert judge(5, 6, 9) == "tied", "what follows a tie is another text"
    assert judge(5, 7, 5) == judge(8, 5, 5) == "strayed"
    assert judge(5, 5) == judge(5, 5, 5, 5) == "wrong"


@pytest.mark.parametrize("bad", [1, 8, 20])
def test_strays_are_measured_at_every_load(bad: int) -> None:
    """A server whose first answer of a batch strays when it has `bad` of them."""
    questions = [Question((number,), "a", tokens=(5, 5), likeliest=({5: -1.0},) * 2) for number in range(40)]

    class Server:
        def generate(self, prompts: list[list[int]], params: object, adapters: list[str]) -> list[SimpleNamespace]:
            first = 9 if len(prompts) == bad else 5
            outputs = [CompletionOutput(0, token_ids=[5, 5]) for _ in prompts]
            outputs[0] = CompletionOutput(0, token_ids=[first, 5])
            return [SimpleNamespace(outputs=[output]) for output in outputs]

    server: Any = Server()
    assert undisturbed_strays(server, questions, 20, random.Random(0)) == 1 / bad
    assert undisturbed_strays(server, [Question("hello", None, text="hi")], 20, random.Random(0)) == 0.0


def test_answers_may_stray_as_often_as_they_did_before_the_attacks() -> None:
    assert too_many_strays({"right": 500}, 0.0) is None
    assert too_many_strays({"right": 500, "strayed": 1}, 0.0) is not None, "on a CPU in fp32 none does"
    assert too_many_strays({"tied": 700, "strayed": 300}, 0.28) is None
    told = too_many_strays({"tied": 500, "strayed": 500}, 0.28)
    assert told is not None and "500 of 1000" in told
    assert too_many_strays({"tied": 5, "strayed": 5}, 0.28) is None, "too few to tell"


def test_kills_come_when_they_are_due() -> None:
    served = SimpleNamespace(undisturbed=0.0)
    coming = order(ATTACKS, random.Random(0), served, 60.0)  # type: ignore[arg-type]
    whole = [next(coming) for _ in range(len(ATTACKS) - 1)]
    assert whole.pop() is None, "a round ends"
    assert {attack.name for attack in whole if attack} == {attack.name for attack in ATTACKS if not attack.kills}
    next(coming)
    served.undisturbed = 61.0
    due = next(coming)
    assert due is not None and due.kills
    served.undisturbed = 1.0
    following = next(coming)
    assert following is not None and not following.kills


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGINT])
def test_the_end_comes_once_whatever_is_waited_for(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with Ending(time.monotonic() + 3600.0) as ending:
        with pytest.raises(Ended):
            os.kill(os.getpid(), number)
            threading.Event().wait(3600.0)
        os.kill(os.getpid(), number)
        ending.over()
    assert signal.getsignal(number) is former


def test_a_deadline_interrupts() -> None:
    with pytest.raises(Ended, match="time is over"), Ending(time.monotonic() + 0.05):
        threading.Event().wait(3600.0)


def test_device_memory_must_not_grow_from_start_to_start() -> None:
    starts = Starts()
    starts.seen += [Start(90.0, 500, 900, 70_000, 70_400), Start(20.0, 500, 900, 70_100, 70_400)]
    assert starts.findings() == []
    starts.seen += [Start(20.0, 500, 900, 71_000, 71_000), Start(20.0, 400, 900, 70_000, 70_000)]
    assert starts.findings() == [
        "start 3: 70000 MiB of the device grew to 71000 MiB",
        "start 4: 500 KV pages became 400",
    ]
    assert starts.table()[1].endswith("70000>70400")


def test_memory_of_other_programs_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5000 MiB a stranger holds 3000. What this process holds counts, and what a dead one has left."""
    smi, stranger, dead = tmp_path / "nvidia-smi", os.getppid(), 2**22 - 1
    table = f"{os.getpid()}, 900\\n{stranger}, 3000\\n{dead}, 50\\n"
    smi.write_text(f"#!/bin/sh\ncase \"$*\" in *memory.used*) echo 5000;; *compute-apps*) printf '{table}';; esac\n")
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert device_mib() == 2000
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert device_mib() is None


def test_random_weights_and_adapters_are_served_as_the_command_line_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    subject = prepare(tmp_path, "tiny", 2, 8)
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    settings = serve.settings_of(parser.parse_args(["serve", *subject.arguments, "--max-loras", "16"]))
    assert settings.adapters == {name: str(tmp_path / "model" / "adapters" / name) for name in subject.random_adapters}
    assert settings.llm["load_format"] == "dummy" and settings.llm["max_loras"] == 16
    assert len(subject.random_adapters) == 2 and (subject.honest_adapter / "adapter_config.json").is_file()


def test_damage_changes_half_of_the_files(tmp_path: Path) -> None:
    for index in range(10):
        (tmp_path / f"{index}.bin").write_bytes(bytes([index]) * 1000)
    assert damage(tmp_path, random.Random(0)) == 5
    changed = [p for p in tmp_path.iterdir() if p.read_bytes() != bytes([int(p.stem)]) * 1000]
    assert 4 <= len(changed) <= 5, "a file may be exchanged for itself"


@pytest.mark.first
def test_two_minutes_of_everything_find_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--minutes", "2", "--seed", "1"])
    told = capsys.readouterr().out
    assert code == 0 and "no findings" in told, told
