"""Shows the answers of one batch as they grow: on a terminal all lines at once, into a file or pipe each line when
it is complete.
"""

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

REDRAW_SECONDS = 0.05


class AnswerBoard:
    """One line for each prompt: its label, then its answer so far."""

    def __init__(self, labels: Sequence[str], output: TextIO | None = None) -> None:
        self.output = output if output is not None else sys.stdout
        self.width = max(map(len, labels), default=0)
        self.labels = [label.ljust(self.width) for label in labels]
        self.texts = [""] * len(labels)
        self.live = self.output.isatty()
        self._drawn = 0.0
        if self.live:
            self.output.write("\n" * len(labels))

    def add(self, index: int, text: str, finished: bool) -> None:
        """New text of prompt `index`."""
        self.texts[index] += text
        if self.live and time.monotonic() - self._drawn > REDRAW_SECONDS:
            self.draw()
        elif finished and not self.live:
            self.output.write(f"{self.labels[index]}  {one_line(self.texts[index])}\n")
            self.output.flush()

    def draw(self) -> None:
        """Rewrites the lines on the terminal, cut at its width."""
        columns = shutil.get_terminal_size().columns - 1
        lines = [f"{label}  {one_line(text)}"[:columns] for label, text in zip(self.labels, self.texts, strict=True)]
        self.output.write(f"\x1b[{len(lines)}F" + "".join(f"\x1b[2K{line}\n" for line in lines))
        self.output.flush()
        self._drawn = time.monotonic()

    def close(self) -> None:
        """The last state; to be called at the end."""
        if self.live:
            self.draw()


def one_line(text: str) -> str:
    """`text` without surrounding white space, its line ends and control characters made harmless for a terminal."""
    return "".join(character if character.isprintable() else " " for character in text.strip())


def stream_answers(chunks: Iterable[Any], labels: Sequence[str]) -> list[str]:
    """Shows the chunks of `LLM.stream` as they come; returns the whole answers."""
    board = AnswerBoard(labels)
    try:
        for chunk in chunks:
            board.add(chunk.prompt_index, chunk.text, chunk.finish_reason is not None)
    finally:
        board.close()
    return board.texts
