"""`sidestream generate`: prompts in, answers out, each with its own adapter."""

import argparse
import difflib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..options.engine import add_engine_options, add_model, llm_arguments, positive
from ..options.vllm_flags import add_vllm_flags

DESCRIPTION = """\
Answer prompts, all in one batch; each may use another adapter.

Without -p, prompts are read from standard input, one a line. With one prompt the answer is shown as it grows."""

EXAMPLES = """\
examples:
  sidestream generate -p "What is the capital of France?"
  sidestream generate -p "What is the capital of France?" -a pirate
  sidestream generate -p "What is the capital of France?" -p "Tell me the sum of 3 and 4." -a shout -a none
  sidestream generate models/llama --lora-modules sql=adapters/sql -p "List all users" -a sql --max-tokens 128
  sidestream generate models/llama-instruct --chat -p "List three colours"
  sidestream generate --prompt-ids 0,17,42 --json
  sidestream generate --json < prompts.txt > answers.jsonl

The demo model knows capitals, opposites, colours, young animals, plurals, days, small sums and counting; its adapters
are shout, pirate, json and yoda."""


def token_ids(text: str) -> list[int]:
    """Comma-separated token ids, for argparse."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 0,17,42") from None


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "generate",
        help="answer prompts, each with its own adapter",
        usage="%(prog)s [MODEL] [-p TEXT ...] [-a NAME ...] [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        help="a prompt as comma-separated token ids; may be repeated; needs no tokenizer",
    )
    group.add_argument(
        "-a",
        "--adapter",
        action="append",
        default=[],
        metavar="NAME",
        help="adapter of all prompts, or one for each prompt in turn; `none` is the base model",
    )
    group.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, put into the model's chat template"
    )
    group.add_argument("--json", action="store_true", help="print a JSON object per prompt")
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=positive, default=64, metavar="N", help="longest answer (default: %(default)s)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: %(default)s)"
    )
    group.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="0 switches it off (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--stop", action="append", default=None, metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add_engine_options(parser)
    add_vllm_flags(parser)
    parser.set_defaults(run=run)


def prompts_of(options: argparse.Namespace) -> list[str | list[int]]:
    """The prompts of the command line, or those of standard input.

    Raises ValueError when there are none, or one is empty.
    """
    prompts: list[str | list[int]] = [*options.prompt, *options.prompt_ids]
    if not prompts and not sys.stdin.isatty():
        prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ValueError('there is no prompt; give one with -p "..." or one a line on standard input')
    if any(isinstance(prompt, str) and not prompt.strip() for prompt in prompts):
        raise ValueError("a prompt is empty; give it some text, or token ids with --prompt-ids")
    return prompts


def adapters_for(options: argparse.Namespace, prompts: int, known: dict[str, str]) -> list[str | None]:
    """The adapter of each prompt.

    Raises ValueError for a name that isn't loaded, or for a number of names that fits no reading.
    """
    names = [None if name == "none" else name for name in options.adapter] or [None]
    for name in names:
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(
                f"adapter {name!r} is not loaded; loaded: {', '.join(known) or 'none'}; "
                + (f"did you mean {near[0]}?" if near else f"load it with --lora-modules {name}=DIRECTORY")
            )
    if len(names) not in (1, prompts):
        raise ValueError(
            f"{len(names)} adapters for {prompts} prompts; give one for all, or one for each (`none` for the base "
            "model)"
        )
    return names * prompts if len(names) == 1 else names


def run(options: argparse.Namespace) -> int:
    """Answers the prompts."""
    arguments = llm_arguments(options)
    prompts = prompts_of(options)
    chosen = adapters_for(options, len(prompts), arguments["adapters"])
    from ...runtime.api.sampling_params import SamplingParams
    from ...runtime.llm import LLM
    from ...runtime.text.chat_files import read_chat_templates

    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )
    if options.chat and options.prompt_ids:
        raise ValueError("--chat puts texts into a template; give them with -p, not as --prompt-ids")
    bar = not options.json and sys.stderr.isatty()
    llm = LLM(**arguments, show_progress=bar)
    if options.chat:
        talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(talks, params, chosen, use_tqdm=bar)
        report_precision(llm, bar)
        for prompt, output in zip(prompts, outputs, strict=True):
            show(output if options.json else replace(output, prompt=str(prompt)), options.json)
        return 0
    # the demo model's template leaves a prompt as it is
    if options.model and llm.tokenizer is not None and read_chat_templates(Path(arguments["model"])).templates:
        print(
            "sidestream: this model has a chat template, which prompts do not get here; `generate --chat` uses it, and "
            "`sidestream chat` talks with a server",
            file=sys.stderr,
        )
    if len(prompts) == 1 and isinstance(prompts[0], str) and llm.tokenizer is not None and not options.json:
        started, chunks = False, llm.stream(prompts, params, adapter=chosen)
        report_precision(llm, bar)
        for chunk in chunks:
            text = chunk.text if started else chunk.text.lstrip()
            started = started or bool(text)
            print(text, end="", flush=True)
        print()
        return 0
    outputs = llm.generate(prompts, params, adapter=chosen, use_tqdm=bar)
    report_precision(llm, bar)
    for output in outputs:
        show(output, options.json)
    return 0


def report_precision(llm: Any, shown: bool) -> None:
    """Print the precision on stderr, unless the start has `shown` it. Requests have been accepted: a refused one is
    reported on one line alone.
    """
    if not shown:
        print(f"sidestream: {llm.model.precision}", file=sys.stderr)


def show(output: Any, as_json: bool) -> None:
    """Prints one request's answer."""
    answer = output.outputs[0]
    if as_json:
        fields = {
            "prompt": output.prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "adapter": output.adapter,
            "text": answer.text,
            "token_ids": answer.token_ids,
        }
        print(json.dumps(fields | {"finish_reason": answer.finish_reason}, ensure_ascii=False), flush=True)
        return
    prompt = output.prompt if output.prompt is not None else ",".join(map(str, output.prompt_token_ids))
    text = answer.text if answer.text else ",".join(map(str, answer.token_ids))
    print(f"[{output.adapter or 'base'}] {prompt}\n{text.strip()}\n", flush=True)
