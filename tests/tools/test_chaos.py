"""The chaos harness sees what it is there to see: a round against a live server, and findings where there are some."""

import os
import random
import re
from pathlib import Path

import pytest
from sidestream.runtime.wire import protocol
from sidestream.tools.chaos import caches, frames
from sidestream.tools.chaos.lives import Lives
from sidestream.tools.chaos.report import Line, growth, table
from sidestream.tools.chaos.run import main
from sidestream.tools.chaos.served import Holdings


def test_a_round_of_harmless_attacks_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--minutes", "0", "--clients", "2", "--only", "hostile frames", "half greetings", "killed process"])
    told = capsys.readouterr().out
    assert code == 0 and "no findings" in told, told
    assert "hostile frames               1     10000         1         0" in told
    assert re.search(r"a process was killed; served again +1 ", told), told


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


def test_growth_is_told_by_process_and_kind() -> None:
    before = {"batcher": Holdings(100 << 20, 20, 5), "supervisor": Holdings(30 << 20, 9, 1)}
    after = {"batcher": Holdings(200 << 20, 40, 30), "supervisor": Holdings(31 << 20, 9, 1)}
    found = growth(before, after)
    assert [each.split(":")[0] for each in found] == ["batcher"] * 3
    line = Line("hang-ups", attempts=4, rounds=1, findings=["processes died"])
    told = table({"hang-ups": line}, {"right": 3, "wrong": 1}, found, before, after)
    assert (
        "hang-ups: processes died" in told and "batcher: 20 open files grew to 40" in told and "no findings" not in told
    )


def test_growth_of_a_life_is_that_of_its_last_ten_minutes_over_its_first() -> None:
    """This process is looked at: it grows by 64 MiB while young, and again by as much when it is old."""
    lives, mine, blocks = Lives(), {"supervisor": os.getpid()}, []
    for minute in range(0, 31, 5):
        if minute in (5, 25):
            blocks.append(b"x" * (64 << 20))
        lives.look(minute * 60.0, mine)
        assert bool(lives.findings()) == (minute >= 25)
    (row,) = lives.table()[1:]
    assert row.startswith("supervisor") and " 30.0 " in row


def test_a_life_of_less_than_twenty_minutes_has_no_row() -> None:
    lives = Lives()
    lives.look(0.0, {"supervisor": os.getpid()})
    lives.look(1199.0, {"supervisor": os.getpid()})
    assert lives.table() == lives.findings() == []


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
