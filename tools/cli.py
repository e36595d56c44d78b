"""The `sidestream` command: parse the command line, run the command, and print a user's mistake as one line."""

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
from ..runtime.processes.logs import progress_line
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
    demo,
    diff,
    dump,
    explain,
    fleet,
    gateway,
    generate,
    keys,
    ledger,
    plan,
    replay,
    run_batch,
    serve,
    usage,
)
from .commands import eval as evaluation
from .options.config_file import ConfigParser
from .options.engine import ADVANCED
from .options.environment import version_text
from .tuning import tune

DESCRIPTION = """\
Serve many LoRA adapters of one base model. MODEL is a Hugging Face directory;
without MODEL a command uses the demo model and its four adapters, on any CPU."""

EXAMPLES = """\
examples:
  sidestream demo
  sidestream generate -p "What is the capital of France?" -a pirate
  sidestream COMMAND --help"""

RENAMED = {
    "dump": "inspect dump",
    "explain": "inspect explain",
    "diff": "inspect diff",
    "ledger": "inspect ledger",
    "complete": "generate --server",
    "keygen": "keys curve",
    "keys add": "keys http add",
    "keys list": "keys http list",
    "keys revoke": "keys http revoke",
    "deploy": "fleet deploy",
}
"""Former names of commands, which the next release removes."""

NEAR = 0.8
"""Similarity of a suggested flag: --dtype is not a misspelled --lora-dtype."""


class Parser(ConfigParser):
    """A parser that reports an error on one line, without the usage, and takes no shortened flags: a misspelled one
    could be the beginning of another.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def format_help(self) -> str:
        """Return the help with the advanced group last."""
        self._action_groups.sort(key=lambda group: group.title == ADVANCED)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line; suggest a choice for a misspelled one."""
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice is not None:
            near = difflib.get_close_matches(choice[1], re.findall(r"'(.*?)'", choice[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message}{'' if message.endswith('?') else ';'} see {self.prog} --help\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and report unknown arguments with the nearest flag."""
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            shown = [
                flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings
            ]
            near = difflib.get_close_matches(rest[0].partition("=")[0], shown, 1, NEAR)
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f"; did you mean {near[0]}?" if near else ""))
        return options, rest


class _Version(argparse.Action):
    """Print the versions and exit; looking them up takes too long for other commands."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        print(version_text())
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; it imports neither torch nor a tokenizer."""
    parser = Parser(
        prog="sidestream",
        usage="%(prog)s COMMAND ...",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of sidestream, torch and triton")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog="sidestream")
    for module in (demo, generate, chat, run_batch, serve, gateway, keys, usage, replay):
        module.add_parser(commands)
    _add_group(commands, "fleet", "run a fleet of engines on Ray Serve", fleet)
    _add_group(commands, "inspect", "inspect compiled programs and passes", dump, diff, explain, ledger)
    for module in (plan, calibrate, evaluation, tune):
        module.add_parser(commands)
    benches = bench_latency, bench_throughput, bench_kernels, bench_startup, bench_serve, bench_gateway, bench_http
    _add_group(commands, "bench", "measure speed", *benches, metavar="BENCH")
    collect_env.add_parser(commands)
    return parser


def _add_group(commands: Any, name: str, about: str, *modules: Any, metavar: str = "COMMAND") -> None:
    """Add a command with the modules' commands below it."""
    group = commands.add_parser(
        name, help=about, description=f"{about.capitalize()}; see `sidestream {name} {metavar} --help`."
    )
    members = group.add_subparsers(title="commands", metavar=metavar, required=True)
    for module in modules:
        module.add_parser(members)


def with_new_name(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the present name of a renamed command, and print that name on stderr."""
    for words in (2, 1):
        old = " ".join(arguments[:words])
        if old in RENAMED:
            new = RENAMED[old]
            print(f"sidestream: `{old}` is now `{new}`; the next release removes the old name", file=sys.stderr)
            rest = list(arguments[words:])
            if old == "complete":
                rest = [re.sub(r"^--address(?==|$)", "--server", word) for word in rest]
            return [*new.split(), *rest]
    return list(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code: 0 done, 2 the user's mistake, 130 interrupted."""
    raise_gc_thresholds()
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from argcomplete import autocomplete

        autocomplete(parser)
    options = parser.parse_args(with_new_name(sys.argv[1:] if arguments is None else arguments))
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
        print(progress_line(f"error: {memory or with_flags(one_line(problem), vars(options))}"), file=sys.stderr)
        return 2


ADVICE = {
    errno.ENOSPC: "free some, or write to another disk",
    errno.EDQUOT: "free some, or write to another disk",
    errno.EROFS: "write to another disk",
    errno.ENOENT: "name an existing one",
    errno.EACCES: "check its permissions",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a directory",
}
"""Remedies for errors of the operating system."""


def is_clear(problem: Exception) -> bool:
    """Return whether the message is enough (our errors, wrong values, files); other errors keep their traceback."""
    return (
        isinstance(problem, (ValueError, OSError, MemoryError))
        or type(problem).__module__.partition(".")[0] == "sidestream"
    )


def one_line(problem: BaseException) -> str:
    """Return the message of an exception on one line, never empty."""
    if isinstance(problem, OSError) and problem.strerror:
        where = "" if problem.filename is None else f"{problem.filename}: "
        advice = ADVICE.get(problem.errno or 0)
        return f"{where}{problem.strerror}" + (f"; {advice}" if advice else "")
    return " ".join(str(problem).split()) or type(problem).__name__


if __name__ == "__main__":
    sys.exit(main())
