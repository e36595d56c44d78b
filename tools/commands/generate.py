"""`sidestream generate`: answer prompts, with a model in this process or on a running server."""

import argparse
import difflib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..options.client import add_connection_options, add_sampling_options, connect, printable, sampling_params
from ..options.engine import add_command, add_engine_options, add_model, llm_arguments
from ..options.launcher_flags import add_launcher_flags

DESCRIPTION = """\
Answer prompts, all in one batch; each may use another adapter.

Without -p, prompts are read from standard input, one a line. With one prompt the answer is printed as it grows. With
--server a running server answers; Ctrl-C cancels the request there."""

EXAMPLES = """\
examples:
  sidestream generate -p "What is the capital of France?"
  sidestream generate -p "What is the capital of France?" -a pirate
  sidestream generate -p "What is the capital of France?" -p "Tell me the sum of 3 and 4." -a shout -a none
  sidestream generate models/llama --lora-modules sql=adapters/sql -p "List all users" -a sql --max-tokens 128
  sidestream generate models/llama-instruct --chat -p "List three colours"
  sidestream generate --prompt-ids 0,17,42 --json
  sidestream generate --json < prompts.txt > answers.jsonl
  sidestream generate --server -p "List all users" -a sql
  sidestream generate --server tcp://gpu-host:5757 --keys keys/client-alice --json < prompts.txt > answers.jsonl

The demo model answers questions about capitals, opposites, colours, young animals, plurals, days, small sums and
counting; its adapters are shout, pirate, json and yoda."""


def token_ids(text: str) -> list[int]:
    """Parse comma-separated token ids."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 0,17,42") from None


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s [MODEL] [-p TEXT ...] [-a NAME ...] [options]"
    parser = add_command(
        commands, "generate", "answer prompts, each with its own adapter", DESCRIPTION, EXAMPLES, run, usage
    )
    add_model(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    group.add_argument(
        "--prompt-ids",
        action="append",
        default=[],
        type=token_ids,
        metavar="IDS",
        help="comma-separated token ids; may be repeated",
    )
    group.add_argument(
        "-a",
        "--adapter",
        action="append",
        default=[],
        metavar="NAME",
        help="adapter of all prompts, or one for each; `none`: the base model",
    )
    group.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, put into the model's chat template"
    )
    group.add_argument("--json", action="store_true", help="print a JSON object per prompt")
    group.add_argument("--echo", action="store_true", help="print the prompt before its answer")
    group = add_sampling_options(parser, temperature=0.0, max_tokens=64, seed=False)
    group.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-sequence token")
    others = {action.dest for action in parser._actions}
    add_connection_options(parser, "--server", optional=True)
    before = {action.dest for action in parser._actions}
    add_engine_options(parser)
    engine = {action.dest: action.default for action in parser._actions if action.dest not in before | others}
    add_launcher_flags(parser)
    parser.set_defaults(engine_defaults=engine, seed=None)


def prompts_of(options: argparse.Namespace) -> list[str | list[int]]:
    """Return the prompts of the command line, or those of standard input.

    Raises ValueError if there are none, or one is empty.
    """
    prompts: list[str | list[int]] = [*options.prompt, *options.prompt_ids]
    if not prompts and not sys.stdin.isatty():
        prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ValueError('there is no prompt; give one with -p "..." or one a line on standard input')
    if any(isinstance(prompt, str) and not prompt.strip() for prompt in prompts):
        raise ValueError("a prompt is empty; give it some text, or token ids with --prompt-ids")
    return prompts


def adapters_for(names: list[str], prompts: int, known: dict[str, str] | None = None) -> list[str | None]:
    """Return the adapter of each prompt; `known` None leaves the check of names to the server.

    Raises ValueError for an unknown name, and for a number of names that is neither one nor that of the prompts.
    """
    chosen = [None if name == "none" else name for name in names] or [None]
    for name in chosen:
        if known is not None and name is not None and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(
                f"adapter {name!r} is not loaded; loaded: {', '.join(known) or 'none'}; "
                + (f"did you mean {near[0]}?" if near else f"load it with --lora-modules {name}=DIRECTORY")
            )
    if len(chosen) not in (1, prompts):
        raise ValueError(
            f"{len(chosen)} adapters for {prompts} prompts; give one for all, or one for each (`none` for the base "
            "model)"
        )
    return chosen * prompts if len(chosen) == 1 else chosen


def run(options: argparse.Namespace) -> int:
    """Answer the prompts."""
    if options.address is not None:
        return run_on_server(options)
    options.seed = options.seed or 0
    arguments = llm_arguments(options)
    prompts = prompts_of(options)
    chosen = adapters_for(options.adapter, len(prompts), arguments["adapters"])
    from ...runtime.llm import LLM
    from ...runtime.text.chat_files import read_chat_templates

    params = sampling_params(options, seed=None, ignore_eos=options.ignore_eos)
    if options.chat and options.prompt_ids:
        raise ValueError("--chat puts texts into a template; give them with -p, not as --prompt-ids")
    bar = not options.json and sys.stderr.isatty()
    llm = LLM(**arguments, show_progress=bar)
    if options.chat:
        talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(talks, params, chosen, use_tqdm=bar)
        report_precision(llm, bar)
        for prompt, output in zip(prompts, outputs, strict=True):
            show(output if options.json else replace(output, prompt=str(prompt)), options)
        return 0
    # the demo model's template leaves a prompt as it is
    if options.model and llm.tokenizer is not None and read_chat_templates(Path(arguments["model"])).templates:
        print(
            "sidestream: prompts do not get this model's chat template; `generate --chat` applies it, and `sidestream "
            "chat` talks with a server",
            file=sys.stderr,
        )
    if len(prompts) == 1 and isinstance(prompts[0], str) and llm.tokenizer is not None and not options.json:
        started, chunks = False, llm.stream(prompts, params, adapter=chosen)
        report_precision(llm, bar)
        if options.echo:
            print(prompts[0], end="")
        for chunk in chunks:
            text = chunk.text if started else chunk.text.lstrip()
            started = started or bool(text)
            print(text, end="", flush=True)
        print()
        return 0
    outputs = llm.generate(prompts, params, adapter=chosen, use_tqdm=bar)
    report_precision(llm, bar)
    for output in outputs:
        show(output, options)
    return 0


def run_on_server(options: argparse.Namespace) -> int:
    """Let a running server answer the prompts.

    Raises ValueError for options of a model in this process.
    """
    changed = [name for name, default in options.engine_defaults.items() if getattr(options, name, default) != default]
    changed += ["model"] * bool(options.model) + ["chat"] * options.chat
    if set(changed) - {"seed"}:
        name = next(name for name in changed if name != "seed")
        shown = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        raise ValueError(f"{shown} cannot be used with --server, which has its own model and options; leave it out")
    params = sampling_params(options, ignore_eos=options.ignore_eos)
    prompts = prompts_of(options)
    adapters = adapters_for(options.adapter, len(prompts))
    with connect(options) as client:
        if len(prompts) == 1 and isinstance(prompts[0], str) and not options.json and client.connect().has_tokenizer:
            if options.echo:
                print(printable(prompts[0]), end="")
            for chunk in client.stream(prompts[0], params, adapters[0]):
                print(printable(chunk.text), end="", flush=True)
            print()
            return 0
        for prompt, output in zip(prompts, client.generate(prompts, params, adapters), strict=True):
            show(output, options, prompt)
    return 0


def report_precision(llm: Any, shown: bool) -> None:
    """Print the precision on stderr, unless it was `shown` at the start.

    Call it after requests are accepted, so that the error of a refused request is the only line.
    """
    if not shown:
        print(f"sidestream: {llm.model.precision}", file=sys.stderr)


def show(output: Any, options: argparse.Namespace, prompt: str | list[int] | None = None) -> None:
    """Print one answer; `prompt` is that of a server's answer, which does not repeat it."""
    answer = output.outputs[0]
    text = output.prompt if prompt is None else prompt if isinstance(prompt, str) else None
    token_ids = output.prompt_token_ids if prompt is None else prompt
    if options.json:
        asked: dict[str, Any] = {"prompt": text, "prompt_token_ids": token_ids}
        if prompt is not None:
            asked = {"prompt": text} if text is not None else {"prompt_token_ids": token_ids}
        fields = {"adapter": output.adapter, "text": answer.text, "token_ids": answer.token_ids}
        print(json.dumps(asked | fields | {"finish_reason": answer.finish_reason}, ensure_ascii=False), flush=True)
        return
    shown = text if text is not None else ",".join(map(str, token_ids))
    answered = answer.text
    if text is None and not answered:  # the model has no tokenizer
        answered = ",".join(map(str, answer.token_ids))
    echo = shown if options.echo else ""
    if prompt is not None:
        shown, echo, answered = printable(shown), printable(echo), printable(answered)
    print(f"[{output.adapter or 'base'}] {shown}\n{echo}{answered.strip()}\n", flush=True)
