"""Print the answers of one batch as they grow: all lines at once on a terminal, else each line when it is complete."""

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
        """Add new text of prompt `index`."""
        self.texts[index] += text
        if self.live and time.monotonic() - self._drawn > REDRAW_SECONDS:
            self.draw()
        elif finished and not self.live:
            self.output.write(f"{self.labels[index]}  {one_line(self.texts[index])}\n")
            self.output.flush()

    def draw(self) -> None:
        """Redraw the lines on the terminal, cut at its width."""
        columns = shutil.get_terminal_size().columns - 1
        lines = [f"{label}  {one_line(text)}"[:columns] for label, text in zip(self.labels, self.texts, strict=True)]
        self.output.write(f"\x1b[{len(lines)}F" + "".join(f"\x1b[2K{line}\n" for line in lines))
        self.output.flush()
        self._drawn = time.monotonic()

    def close(self) -> None:
        """Draw the final state."""
        if self.live:
            self.draw()


def one_line(text: str) -> str:
    """Return `text` without surrounding white space and with control characters replaced by spaces."""
    return "".join(character if character.isprintable() else " " for character in text.strip())


def stream_answers(chunks: Iterable[Any], labels: Sequence[str]) -> list[str]:
    """Print the chunks of `LLM.stream` as they arrive, and return the whole answers."""
    board = AnswerBoard(labels)
    try:
        for chunk in chunks:
            board.add(chunk.prompt_index, chunk.text, chunk.finish_reason is not None)
    finally:
        board.close()
    return board.texts
