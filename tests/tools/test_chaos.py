"""The chaos harness sees what it is there to see: a round against a live server, and findings where there are some."""

import argparse
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sidestream.runtime.requests.outputs import CompletionOutput
from sidestream.runtime.wire import protocol
from sidestream.tools.bench.model_directory import TINY
from sidestream.tools.chaos import caches, frames
from sidestream.tools.chaos.attacks import ATTACKS
from sidestream.tools.chaos.ending import Ended, Ending
from sidestream.tools.chaos.lives import Life, Lives, grown
from sidestream.tools.chaos.questions import Question
from sidestream.tools.chaos.report import Line, table
from sidestream.tools.chaos.run import main, order
from sidestream.tools.chaos.served import Holdings
from sidestream.tools.chaos.starts import Start, Starts
from sidestream.tools.chaos.subjects import prepare
from sidestream.tools.commands import serve
from sidestream.tools.options.models import SHAPES


def test_a_round_of_harmless_attacks_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
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
            protocol.decode_from_client(frame)
        except protocol.FrameError:
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


def test_growth_in_minutes_is_told_by_process_and_kind() -> None:
    """Looks of a life that is old enough; a younger one says nothing."""

    def life(seconds: float) -> Life:
        before, after = Holdings(100 << 20, 20, 5), Holdings(200 << 20, 40, 30)
        return Life("batcher", [(0.0, before), (seconds / 2 - 1, before), (seconds, after)])

    assert [each.split(": ")[1].split(" grew")[0] for each in grown(life(300.0))] == [
        "100 MiB",
        "20 open files",
        "5 threads",
    ]
    assert grown(life(200.0)) == []


def test_growth_of_a_life_is_that_of_its_last_ten_minutes_over_its_first() -> None:
    """This process is looked at: it grows by 64 MiB while young, and again by as much when it is old."""
    lives, mine, blocks = Lives(), {"supervisor": os.getpid()}, []
    for minute in (0, 1, 5, 10, 15, 20, 25, 30):
        if minute in (1, 25):
            blocks.append(b"x" * (64 << 20))
        lives.look(minute * 60.0, mine)
        assert bool(lives.findings()) == (minute >= 25)
    assert lives.table()[-1].startswith("supervisor") and " 30.0 " in lives.table()[-1]


def test_ten_minutes_are_compared_from_twenty_on() -> None:
    lives = Lives()
    lives.look(0.0, {"supervisor": os.getpid()})
    lives.look(1199.0, {"supervisor": os.getpid()})
    assert len(lives.table()) == 2 and lives.findings() == []
    lives.look(1200.0, {"supervisor": os.getpid()})
    assert len(lives.table()) == 5


def test_a_measured_answer_may_only_be_left_where_two_tokens_are_as_likely() -> None:
    likely = {5: -1.0, 6: -1.2, 7: -1.5}
    question = Question((1, 2), "a", tokens=(5, 5, 5), likeliest=(likely,) * 3)

    def judge(*tokens: int) -> str:
        return question.judge(CompletionOutput(0, token_ids=list(tokens)))

    assert judge(5, 5, 5) == "right"
    assert judge(5, 6, 9) == "tied", "what follows a tie is another text"
    assert judge(5, 7, 5) == judge(8, 5, 5) == judge(5, 5) == judge(5, 5, 5, 5) == "wrong"


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
    with Ending(time.monotonic() + 0.05), pytest.raises(Ended, match="time is over"):
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
    assert caches.damage(tmp_path, random.Random(0)) == 5
    changed = [p for p in tmp_path.iterdir() if p.read_bytes() != bytes([int(p.stem)]) * 1000]
    assert 4 <= len(changed) <= 5, "a file may be exchanged for itself"


def test_two_minutes_of_everything_find_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--minutes", "2", "--seed", "1"])
    told = capsys.readouterr().out
    assert code == 0, told
