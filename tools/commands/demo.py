"""`sidestream demo`: the whole pipeline on the embedded demo model, on one screen."""

import argparse
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ...runtime.demo_model import DEMO_MODEL
from ..options.engine import (
    add_command,
    add_compile_options,
    add_option,
    add_ranks,
    check_output_directory,
    demo_prompts,
    given,
    precision_arguments,
    writing,
)

if TYPE_CHECKING:
    from ...compiler.pass_records import PassRecord

DESCRIPTION = """\
Compile the demo model, answer one batch in which every prompt has another adapter (and one has none), and show what
each compiler pass did. Needs no GPU, no network and no files: the model and its four adapters are in the package.
The precision is int8 on a CPU too, so that all passes are shown; `LLM` and `sidestream serve` use the checkpoint's."""

EXAMPLES = """\
examples:
  sidestream demo
  sidestream demo --precision fp32                      nothing quantized
  sidestream demo --disable-pass pack_projections       the same answers with more kernels
  sidestream demo --tensor-parallel-size 2              two processes, one model
  sidestream demo -o dump/                              another directory for the dump"""

REDRAW_SECONDS = 0.05


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s [options]"
    parser = add_command(
        commands, "demo", "see the whole pipeline on the demo model", DESCRIPTION, EXAMPLES, run, usage
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("sidestream_dump"),
        metavar="DIR",
        help="directory for the dump (default: %(default)s)",
    )
    add_option(parser, "device", choices=("cpu", "cuda"))
    add_ranks(parser)
    add_compile_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the demo; return 1 if an answer is not the expected one."""
    check_output_directory("--output", options.output)
    from ...runtime.api.sampling_params import SamplingParams
    from ...runtime.llm import LLM

    prompts = demo_prompts()
    adapters = {
        str(entry["adapter"]): str(DEMO_MODEL / "adapters" / str(entry["adapter"]))
        for entry in prompts
        if entry["adapter"]
    }
    print(f"Compiling the demo model with {len(adapters)} adapters: {', '.join(adapters)}", flush=True)
    started = time.monotonic()
    llm = LLM(
        str(DEMO_MODEL),
        adapters=adapters,
        max_model_len=256,
        max_num_seqs=8,
        show_progress=sys.stderr.isatty(),
        **precision_arguments(options),
        **given(options, "device", "tensor_parallel_size"),
    )
    precision, _, _ = llm.model.precision.partition(":")
    print(
        f"Ready after {time.monotonic() - started:.1f} s, {precision}. One batch, {len(prompts)} prompts:\n", flush=True
    )
    started = time.monotonic()
    labels = [f"{entry['adapter'] or 'base':<7}  {entry['prompt']}" for entry in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    texts = stream_answers(
        llm.stream([entry["prompt"] for entry in prompts], params, [entry["adapter"] for entry in prompts]), labels
    )
    wrong = [
        label for label, text, entry in zip(labels, texts, prompts, strict=True) if text.strip() != entry["answer"]
    ]
    print(f"\nAnswered in {time.monotonic() - started:.1f} s, all in the same steps. What the compiler did:\n")
    print(pass_summary(llm.compiled.records))
    with writing(options.output):
        written = llm.compiled.dump(options.output)
    print(
        f"The dump lies in {written}/: every graph before and after, what was refused and\nwhy, programs and schedules."
    )
    print(next_steps(str(options.output)))
    for label in wrong:
        print(f"unexpected answer: {label}", file=sys.stderr)
    return 1 if wrong else 0


def next_steps(dump: str) -> str:
    """Return the path of the command, and three commands to try."""
    command = Path(sys.argv[0])
    if command.name != "sidestream":
        command = Path(sys.executable).with_name("sidestream")
    found = shutil.which("sidestream")
    name = "sidestream" if found is not None and Path(found).resolve() == command.resolve() else _short(command)
    tries = (
        ("ask it something else", 'generate -p "What is the capital of Spain?" -a yoda'),
        ("serve it, and talk with it from another terminal", "serve", "chat -a pirate"),
        ("see where a step of a large model spends its time", "inspect explain --shape llama-3.1-8b"),
    )
    lines = [f"The command is {name}. Open {dump}/index.html in a browser, or try:"]
    for title, *calls in tries:
        lines += [f"  {title}:", *(f"    {name} {call}" for call in calls)]
    return "\n" + "\n".join(lines)


def _short(path: Path) -> str:
    """Return the path relative to the current directory, if it is below it."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def pass_summary(records: "Sequence[PassRecord]") -> str:
    """Return one line per pass: its matches, and the number of kernels before and after."""
    from ...compiler.pass_records import columns

    rows = [("pass", "matches", "kernels")]
    for record in records:
        rows.append(
            (record.name, str(record.matches), f"{sum(record.ops_before.values())} -> {sum(record.ops_after.values())}")
        )
    rows.append(("all", "", f"{sum(records[0].ops_before.values())} -> {sum(records[-1].ops_after.values())}"))
    return columns(rows, right=(1,))


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
