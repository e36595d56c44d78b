"""`sidestream complete`: prompts to a running server, answers out, each with its own adapter."""

import argparse
import json
import sys
from typing import Any

from ..options.client import add_connection_options, add_sampling_options, connect, harmless, sampling_params
from .generate import prompts_of, token_ids

DESCRIPTION = """\
Let a running server complete prompts; each may use another adapter.

Without -p, prompts are read from standard input, one a line. With one prompt the answer is shown as it grows; Ctrl-C
ends it on the server, too."""

EXAMPLES = """\
examples:
  sidestream complete -p "The capital of France is"
  sidestream complete -p "List all users" -a sql --max-tokens 128
  sidestream complete -p "one" -p "two" -a shout -a none --json
  sidestream complete --address tcp://gpu-host:5757 --keys keys/client-alice --json < prompts.txt > answers.jsonl"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "complete",
        help="complete prompts on a running server",
        usage="%(prog)s [-p TEXT ...] [-a NAME ...] [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("prompts")
    group.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    group.add_argument(
        "--prompt-ids",
        action="append",
        default=[],
        type=token_ids,
        metavar="IDS",
        help="a prompt as comma-separated token ids; may be repeated",
    )
    group.add_argument(
        "-a",
        "--adapter",
        action="append",
        default=[],
        metavar="NAME",
        help="adapter of all prompts, or one for each in turn; `none` is the base model",
    )
    group.add_argument("--json", action="store_true", help="print a JSON object per prompt")
    add_sampling_options(parser, temperature=0.0, max_tokens=64)
    group = parser.add_argument_group("more")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    group.add_argument("--echo", action="store_true", help="show the prompt before its answer")
    add_connection_options(parser)
    parser.set_defaults(run=run)


def adapters_for(names: list[str], prompts: int) -> list[str | None]:
    """The adapter of each prompt. Raises ValueError for a number of names that fits no reading."""
    chosen = [None if name == "none" else name for name in names] or [None]
    if len(chosen) not in (1, prompts):
        raise ValueError(
            f"{len(chosen)} adapters for {prompts} prompts; give one for all, or one for each (`none` for the base "
            "model)"
        )
    return chosen * prompts if len(chosen) == 1 else chosen


def run(options: argparse.Namespace) -> int:
    """Completes the prompts."""
    params = sampling_params(options, ignore_eos=options.ignore_eos)
    prompts = prompts_of(options)
    adapters = adapters_for(options.adapter, len(prompts))
    with connect(options) as client:
        if len(prompts) == 1 and isinstance(prompts[0], str) and not options.json and client.connect().has_tokenizer:
            if options.echo:
                print(harmless(prompts[0]), end="")
            for chunk in client.stream(prompts[0], params, adapters[0]):
                print(harmless(chunk.text), end="", flush=True)
            print()
            return 0
        for prompt, output in zip(prompts, client.generate(prompts, params, adapters), strict=True):
            show(prompt, output, options)
    return 0


def show(prompt: str | list[int], output: Any, options: argparse.Namespace) -> None:
    """Prints one prompt's answer."""
    answer = output.outputs[0]
    if options.json:
        asked = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        fields = {
            "adapter": output.adapter,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
        }
        print(json.dumps(asked | fields, ensure_ascii=False), flush=True)
        return
    shown = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    text = answer.text or ",".join(map(str, answer.token_ids))
    sys.stdout.write(
        f"[{output.adapter or 'base'}] "
        f"{harmless(shown)}\n{harmless(shown) if options.echo else ''}{harmless(text).strip()}\n\n"
    )
    sys.stdout.flush()
