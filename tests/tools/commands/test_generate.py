"""What `sidestream generate` prints of an answer."""

import argparse

import pytest
from sidestream.runtime.api.outputs import CompletionOutput, RequestOutput
from sidestream.tools.commands.generate import show


@pytest.mark.parametrize(("prompt", "shown"), [("hi", "[base] hi\n\n\n"), (None, "[base] 7,8\n2\n\n")])
def test_an_answer_without_text(prompt: str | None, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A model may end at once: the answer to a text is empty, and one without a tokenizer has its token ids."""
    answer = CompletionOutput(0, "", [2], finish_reason="stop")
    show(RequestOutput("0", prompt, [7, 8], [answer], True), argparse.Namespace(json=False, echo=False))
    assert capsys.readouterr().out == shown
