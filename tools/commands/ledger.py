"""`sidestream inspect ledger`: the error of the logits that each compiler pass adds."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runtime.text.token_bytes import as_text
from ..options.engine import (
    adapters_of,
    add_command,
    add_compile_options,
    add_lora_options,
    add_model,
    check_output,
    compile_arguments,
    demo_prompts,
    model_directory,
    writing,
)
from ..options.models import load_model, reference_logits

DESCRIPTION = """\
Run the graph after every compiler pass on the same batch of prompts, on the CPU, and print the error of the logits that
each pass adds:
  added        relative RMSE against the graph right before the pass
  total        relative RMSE against the graph before any pass (or, with --reference fp32, the model in fp32)
  mean KL      KL divergence from the logits before the pass, mean over the tokens; worst KL: of the worst token, with
               its name
  worst layer  the layer in which the residual stream's relative error grows most, and by how much
A pass of tier `keeps` should add rounding errors only. The last row is the program of the last graph. The batch mixes
all adapters: the demo's prompts with their answers, or each --prompt for the base and for every adapter. Rows with
(decode) are passes of decode programs: the last token of every prompt without adapter again, as a decode step; with
(decode, adapters) the last token of every prompt."""

EXAMPLES = """\
examples:
  sidestream inspect ledger                       the demo model and its adapters
  sidestream inspect ledger --reference fp32      the distance of each graph from the model in fp32
  sidestream inspect ledger --precision fp32      passes alone: no quantization, hardly any rounding
  sidestream inspect ledger models/llama --lora-modules sql=adapters/sql -p "List all users" --json ledger.json
  sidestream inspect dump --ledger ledger.json    the same figures on the page of the dump"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to `sidestream inspect`."""
    usage = "%(prog)s [MODEL] [options]"
    parser = add_command(
        commands, "ledger", "print the error of the logits that each pass adds", DESCRIPTION, EXAMPLES, run, usage
    )
    add_model(parser)
    parser.add_argument(
        "-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt for the batch; may be repeated"
    )
    parser.add_argument(
        "--reference",
        choices=("graph", "fp32"),
        default="graph",
        help="reference of the totals (default: the graph before any pass)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the errors for `sidestream inspect dump --ledger`"
    )
    add_compile_options(parser)
    add_lora_options(parser)


def run(options: argparse.Namespace) -> int:
    """Load the model on the CPU, run the graph after every pass, print the table."""
    directory = model_directory(options)
    names = list(adapters_of(options))
    check_output("--json", options.json)
    if any(not prompt for prompt in options.prompt):
        raise ValueError("--prompt is empty; give it some text")
    if options.max_loras is not None and options.max_loras < len(names):
        raise ValueError(
            f"--max-loras {options.max_loras} has no room for all {len(names)} adapters, which the batch mixes; "
            "leave it out"
        )
    from ...compiler.graph.repeated_layers import capture_model
    from ...compiler.inspect.ledger import CAPTURE, PROGRAM, as_json, as_text, largest, ledger
    from ...compiler.options import CompileOptions
    from ...compiler.pipeline import check_disabled
    from ...runtime.quantization.model_statistics import batch_inputs
    from ...runtime.text.tokenizer import load_tokenizer

    compile_options = CompileOptions(**compile_arguments(options))
    check_disabled(compile_options)
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(f"{directory} has no tokenizer; the ledger runs text prompts")
    batch = [(tokenizer.encode(text), slot) for text, slot in prompts(options, names)]
    inputs = batch_inputs(batch)
    model = load_model(options, directory, compile_options.model_dtype)
    reference = reference_logits(load_model(options, directory, None), inputs) if options.reference == "fp32" else None
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    captured = capture_model(model)
    rows = ledger(captured, compile_options, inputs, state, reference=reference)
    adapters = ", ".join(names) or "none"
    print(
        f"{directory.name}: {len(batch)} prompts, {sum(len(ids) for ids, _ in batch)} tokens, adapters: {adapters}, "
        f"precision {compile_options.precision}\n"
    )
    print(as_text(rows, token_names(batch, names, tokenizer)))
    worst = largest([row for row in rows if row.name not in (CAPTURE, PROGRAM)])
    print(f"most is added by {worst.name}: {worst.added:.1e}" if worst.added else "no pass changed any logit")
    if options.json is not None:
        with writing(options.json):
            options.json.write_text(json.dumps(as_json(rows), indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.json}")
    return 0


def prompts(options: argparse.Namespace, names: Sequence[str]) -> list[tuple[str, int]]:
    """Return (text, adapter slot or -1) of the batch."""
    if not options.prompt and not options.model:
        return [
            (f"{entry['prompt']} {entry['answer']}", -1 if entry["adapter"] is None else names.index(entry["adapter"]))
            for entry in demo_prompts()
        ]
    texts = options.prompt or [str(entry["prompt"]) for entry in demo_prompts()[:1]]
    return [(text, slot) for text in texts for slot in (-1, *range(len(names)))]


def token_names(batch: Sequence[tuple[Sequence[int], int]], names: Sequence[str], tokenizer: Any) -> list[str]:
    """Return a name for each row of the logits: prompt and token, such as `shout[7] ' JAPAN'`."""
    return [
        f"{f'{row} ' if len(batch) > 1 else ''}{'base' if slot < 0 else names[slot]}[{place}] "
        f"{as_text(tokenizer.token_bytes(token))!r}"
        for row, (ids, slot) in enumerate(batch)
        for place, token in enumerate(ids)
    ]
