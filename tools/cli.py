"""The `sidestream` command: finds the command's module, hands the parsed options over, and turns a user's mistake
into one line and exit code 2.
"""

import argparse
import difflib
import errno
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..runtime.engine.flag_spelling import with_flags
from ..runtime.processes.garbage_collection import raise_gc_thresholds
from ..runtime.processes.out_of_memory import out_of_memory
from .bench import kernels as bench_kernels
from .bench import latency as bench_latency
from .bench import startup as bench_startup
from .bench import throughput as bench_throughput
from .bench.serving import gateway as bench_gateway
from .bench.serving import http as bench_http
from .bench.serving import serve as bench_serve
from .commands import (
    calibrate,
    chat,
    collect_env,
    complete,
    demo,
    diff,
    dump,
    explain,
    gateway,
    generate,
    keygen,
    keys,
    ledger,
    run_batch,
    serve,
    usage,
)
from .commands import eval as evaluation
from .fleet import deploy, show
from .options.config_file import ConfigParser
from .options.engine import ADVANCED
from .options.environment import version_text
from .tuning import tune

DESCRIPTION = """\
Serve many LoRA fine-tunes of one base model from one GPU.

MODEL is a directory in the Hugging Face format (config.json, *.safetensors, tokenizer.json). Leave it out and the small
demo model inside the package is taken, with its four adapters, so every command can be tried at once, without a GPU."""

EXAMPLES = """\
examples:
  sidestream demo                                                    see the whole pipeline on the demo model
  sidestream generate -p "What is the capital of France?" -a pirate  one prompt, one adapter
  sidestream dump -o dump/                                           write down what each compiler pass did
  sidestream explain                                                 where a step's time goes, and what an option would
                                                                     change
  sidestream bench latency --concurrency 1 8 64                      decode steps next to the memory-bandwidth floor
  sidestream chat --adapter pirate                                   talk with a server that runs
  sidestream COMMAND --help                                          more examples"""


NEAR = 0.8
"""How alike a flag must be to be suggested: --dtype is not --lora-dtype misspelled."""


class Parser(ConfigParser):
    """Says what is wrong with an option in one line, instead of printing every option there is."""

    def format_help(self) -> str:
        """As argparse's, with the advanced group last."""
        self._action_groups.sort(key=lambda group: group.title == ADVANCED)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line; a choice that is nearly one of ours is named."""
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice is not None:
            near = difflib.get_close_matches(choice[1], re.findall(r"'(.*?)'", choice[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message}{'' if message.endswith('?') else ';'} see {self.prog} --help\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, but what this parser does not know is its own error, which names the nearest flag."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            shown = [
                flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings
            ]
            near = difflib.get_close_matches(rest[0].partition("=")[0], shown, 1, NEAR)
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f"; did you mean {near[0]}?" if near else ""))
        return found, rest


class _Version(argparse.Action):
    """Prints the versions and ends; they are looked up only here, since every other command does without."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        print(version_text())
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; nothing heavy is imported for it."""
    parser = Parser(
        prog="sidestream",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of sidestream, torch and triton")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (
        demo,
        generate,
        serve,
        gateway,
        deploy,
        show,
        run_batch,
        complete,
        chat,
        keygen,
        keys,
        usage,
        dump,
        explain,
        diff,
        ledger,
        calibrate,
        evaluation,
        tune,
        collect_env,
    ):
        module.add_parser(commands)
    bench = commands.add_parser(
        "bench", help="measure speed", description="Measure speed. `sidestream bench latency --help` says more."
    )
    benches = bench.add_subparsers(title="benches", metavar="BENCH", required=True)
    for module in (
        bench_latency,
        bench_throughput,
        bench_kernels,
        bench_startup,
        bench_serve,
        bench_gateway,
        bench_http,
    ):
        module.add_parser(benches)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: returns the exit code (0 done, 2 the user's mistake, 130 interrupted)."""
    raise_gc_thresholds()
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as problem:
        memory = out_of_memory(problem)
        if os.environ.get("SIDESTREAM_TRACEBACK") or not (memory or is_clear(problem)):
            raise
        print(f"sidestream: error: {memory or with_flags(one_line(problem), vars(options))}", file=sys.stderr)
        return 2


ADVICE = {
    errno.ENOSPC: "free some, or write to another disk",
    errno.EDQUOT: "free some, or write to another disk",
    errno.EROFS: "write to another disk",
    errno.ENOENT: "name one that is there",
    errno.EACCES: "check its permissions",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a directory",
}
"""What to do about an operating system's error."""


def is_clear(problem: Exception) -> bool:
    """Whether the message alone says what is wrong (our own errors, wrong values, files); anything else is a fault
    of ours and keeps its traceback.
    """
    return (
        isinstance(problem, (ValueError, OSError, MemoryError))
        or type(problem).__module__.partition(".")[0] == "sidestream"
    )


def one_line(problem: BaseException) -> str:
    """The message of an exception on one line, never empty."""
    if isinstance(problem, OSError) and problem.strerror:
        where = "" if problem.filename is None else f"{problem.filename}: "
        advice = ADVICE.get(problem.errno or 0)
        return f"{where}{problem.strerror}" + (f"; {advice}" if advice else "")
    return " ".join(str(problem).split()) or type(problem).__name__


if __name__ == "__main__":
    sys.exit(main())
