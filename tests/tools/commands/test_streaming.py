"""Answers that grow on the screen."""

import io
from types import SimpleNamespace

import pytest
from sidestream.tools.commands.demo import AnswerBoard, one_line, stream_answers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def chunk(index: int, text: str, reason: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(prompt_index=index, text=text, finish_reason=reason)


def test_a_pipe_gets_each_answer_once_when_it_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    texts = stream_answers([chunk(0, " The"), chunk(1, "Arr!", "stop"), chunk(0, " end", "length")], ["base", "pirate"])
    assert texts == [" The end", "Arr!"]
    assert capsys.readouterr().out.splitlines() == ["pirate  Arr!", "base    The end"]


def test_a_terminal_is_redrawn_in_place_and_ends_with_all_lines() -> None:
    screen = Terminal()
    board = AnswerBoard(["a", "b"], screen)
    board.add(0, "x" * 500, False)
    board.add(1, "done", True)
    board.close()
    last = screen.getvalue().rsplit("\x1b[2F", 1)[1].replace("\x1b[2K", "").splitlines()
    assert last[0].startswith("a  xxx") and len(last[0]) < 500, (
        "long lines are cut, or they would wrap and break the redraw"
    )
    assert last[1] == "b  done"


def test_a_models_control_characters_do_not_reach_the_terminal() -> None:
    assert one_line(" a\nb\x1b[31mc ") == "a b [31mc"
