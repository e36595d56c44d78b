"""`sidestream calibrate`: look at a model's keys, values and norms, and decide how its KV cache is quantized and its
channels are smoothed; with --round, round its weights by what they are multiplied with.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...compiler.options import DEFAULT_KV_DTYPE, EIGHT_BITS, NORM_ROTATIONS
from ..options.engine import (
    adapters_of,
    add_lora_options,
    add_model,
    add_option,
    check_output,
    given,
    model_directory,
    positive,
)
from ..options.models import load_model

DESCRIPTION = """\
Run a short text through the unquantized model, with the base and with each adapter, and look at every layer's queries,
keys and values:
  K amax, outliers   largest key, and how far it stands out in its head (1: flat, sqrt(head dim): one channel alone)
  K bias             share of the keys' energy that is the same in all tokens, which centring removes
  int8, e4m3         error of the attention scores in nats with a cache of that type: with Hadamard (the default), and
                     with the best treatment
  V int8, V e4m3     relative error of attention's output for a value cache of that type, and with V rotated
                     (--rotate-values)
  K treated          what is chosen for the layer in the mode that --precision names: Hadamard, centring
  gain               error of the scores with that mode's own cache and Hadamard over that of what is chosen
The largest value of every channel after each norm sets the powers of two by which `smooth_channels` brings them to one
size in int8 mode: no figure of the table, and the largest gain where a model has channels of outliers.
The file holds the keys' means, those powers and these figures, for int8 and fp8 mode alike. LLM(..., calibration=FILE)
and --calibration FILE then decide what kv_dtype "auto" means (the mode's own type, int8 or e4m3, unless the other one's
error is far smaller), and where keys are transformed and centred; as sidestream_calibration.safetensors in the model's
directory it is found without being named. Without one "auto" is the mode's own type, with Hadamard.
--round also writes the weights in eight bits, rounded so that their products with this text change least (GPTQ):
sidestream_rounded_PRECISION.safetensors next to the calibration. They hold for this checkpoint, this calibration and
these options; in the model's directory they are found without being named (--rounded-weights names or leaves them).
For int8 they are also rotated more: norms by 64 columns, and the heads of V. Who serves them need not say so."""

EXAMPLES = """\
examples:
  sidestream calibrate                                                      the demo model and its adapters
  sidestream calibrate models/llama --lora-modules sql=adapters/sql -o models/llama/sidestream_calibration.safetensors
  sidestream calibrate models/llama --prompts corpus.txt --tokens 16384
  sidestream calibrate models/llama --round -o models/llama/sidestream_calibration.safetensors
  sidestream serve models/llama --calibration sidestream_calibration.safetensors"""

DEFAULT_TOKENS, DEFAULT_LENGTH = 4096, 512
CPU_TOKENS, CPU_LENGTH = 1024, 256
ROUND_TOKENS = 16384
"""With --round: sums over few tokens fit those tokens alone."""
ROUNDED_FOR: dict[str, Any] = {"norm_rotation": 64, "rotate_values": True}
"""What --round rounds for in int8 mode unless it is told otherwise: the arm `int8-calibrated-64-rounded-values` of
`sidestream eval --real`.
"""
ADAPTER_DOCUMENTS = 2
CHARACTERS_A_TOKEN = 8
STANDARD_LIBRARY = (
    "textwrap",
    "argparse",
    "statistics",
    "json.decoder",
    "difflib",
    "calendar",
    "tokenize",
    "fractions",
    "heapq",
    "shlex",
)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "calibrate",
        help="look at a model's keys and values, and decide how its KV cache is quantized",
        usage="%(prog)s [MODEL] [--lora-modules NAME=DIR ...] [--prompts FILE] [-o FILE]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("sidestream_calibration.safetensors"),
        metavar="FILE",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="UTF-8 text to run (default: sources of Python's standard library)"
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"tokens of text for the base; each adapter gets two pieces of it (default: {DEFAULT_TOKENS}, "
        f"{ROUND_TOKENS} with --round, on a CPU {CPU_TOKENS})",
    )
    parser.add_argument(
        "--length",
        type=positive,
        metavar="N",
        help=f"tokens of a piece, at most the model's limit (default: {DEFAULT_LENGTH}, on a CPU {CPU_LENGTH})",
    )
    parser.add_argument(
        "--precision",
        choices=EIGHT_BITS,
        default=EIGHT_BITS[0],
        help="the mode whose choices the table shows by layer, and that --round rounds for; the calibration serves all "
        "of them (default: %(default)s)",
    )
    parser.add_argument("--round", action="store_true", help="also round the weights by what they are multiplied with")
    add_option(
        parser,
        "norm_rotation",
        type=int,
        choices=NORM_ROTATIONS,
        help="with --round for int8: columns of a rotated block of what a norm makes (default: "
        f"{ROUNDED_FOR['norm_rotation']})",
    )
    add_option(
        parser,
        "rotate_values",
        help="with --round for int8: where V is rotated by its weights: on, off, or layers such as 0,3-7 (default: on)",
    )
    add_option(parser, "device", choices=("cpu", "cuda"))
    add_lora_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the model twice over the text (means first, then errors), prints the table, writes the file."""
    directory = model_directory(options)
    names = list(adapters_of(options))
    check_output("--output", options.output)
    for name in given(options, *ROUNDED_FOR):
        if not (options.round and options.precision == "int8"):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} says how --round rounds for int8; add --round, or leave it out")
    if options.prompts is not None and not options.prompts.is_file():
        raise ValueError(f"--prompts {options.prompts} is no file; name a text file")
    if options.max_loras is not None and options.max_loras < len(names):
        raise ValueError(f"--max-loras {options.max_loras} has no room for all {len(names)} adapters; leave it out")
    import torch

    from ...graphs.checkpoint import Checkpoint
    from ...runtime.engine.calibration import fingerprint
    from ...runtime.engine.resolve import resolve_device
    from ...runtime.text.tokenizer import load_tokenizer
    from ..quality.calibration import calibrate

    device = resolve_device(options.device)
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(f"{directory} has no tokenizer; calibration runs text")
    model = load_model(options, directory, torch.bfloat16).to(device)
    tokens, length = ROUND_TOKENS if options.round else DEFAULT_TOKENS, DEFAULT_LENGTH
    if device.type == "cpu":
        tokens, length = CPU_TOKENS, CPU_LENGTH
    tokens, length = options.tokens or tokens, options.length or length
    text = standard_text() if options.prompts is None else options.prompts.read_text(encoding="utf-8")
    ids = tokenizer.encode(text[: tokens * CHARACTERS_A_TOKEN])[:tokens]
    jobs = list(documents(ids, min(length, model.config.max_position_embeddings), len(names)))
    if not jobs:
        raise ValueError(f"{options.prompts} has less than two tokens; give it some text")
    calibration = calibrate(
        model,
        jobs,
        device,
        fingerprint(model.config, Checkpoint(directory, model.config)),
        names,
        progress=sys.stderr.isatty(),
    )
    print(f"{directory.name}: {calibration.tokens} tokens, adapters: {', '.join(names) or 'none'}\n")
    print(as_text(calibration, options.precision))
    calibration.save(options.output)
    print(f"written to {options.output}")
    if options.round:
        del model  # the engine has the weights in eight bits
        output = _round(options, directory, calibration, jobs, progress=sys.stderr.isatty())
        print(f"rounded weights written to {output}")
    return 0


def _round(
    options: argparse.Namespace,
    directory: Path,
    calibration: Any,
    jobs: Sequence[tuple[list[int], int]],
    progress: bool,
) -> Path:
    """Write the rounded weights next to the calibration; `jobs`: the text that it was made with."""
    from ...runtime.engine.rounding import file_name
    from ..quality.rounding import round_weights
    from ..quality.teacher_forced import Document

    adapters = adapters_of(options)
    names = [*adapters, None]  # slot -1 is the base model
    output = options.output.absolute().parent / file_name(options.precision)
    chosen = {"precision": options.precision, "calibration": calibration, "device": options.device}
    if options.precision == "int8":
        chosen |= ROUNDED_FOR | given(options, *ROUNDED_FOR)
    texts = [Document(ids, names[slot]) for ids, slot in jobs]
    round_weights(directory, adapters, texts, chosen, output, _bar if progress else lambda stage: None)
    return output


def _bar(stage: str) -> None:
    print(f"\r{stage}\033[K", end="", file=sys.stderr, flush=True)


def standard_text() -> str:
    """Sources of the standard library: code, and the prose of its comments and docstrings."""
    import importlib.util

    found = (importlib.util.find_spec(name) for name in STANDARD_LIBRARY)
    return "\n".join(
        Path(spec.origin).read_text(encoding="utf-8") for spec in found if spec is not None and spec.origin is not None
    )


def documents(ids: Sequence[int], length: int, adapters: int) -> Iterator[tuple[list[int], int]]:
    """(token ids, adapter slot or -1): every piece of the text for the base, and two pieces for each adapter in
    turn.
    """
    pieces = [list(ids[first : first + length]) for first in range(0, len(ids), length)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    yield from ((piece, -1) for piece in pieces)
    for slot in range(adapters):
        for turn in range(min(ADAPTER_DOCUMENTS, len(pieces))):
            yield pieces[(slot * ADAPTER_DOCUMENTS + turn) % len(pieces)], slot


def as_text(calibration: Any, precision: str) -> str:
    """The table by layer with what is chosen in the mode `precision`, and what each mode gets for all layers."""
    from ...compiler.records import columns
    from ...runtime.engine.calibration import KV_DTYPES, TREATMENTS

    chosen, own = calibration.kv_dtype(precision), DEFAULT_KV_DTYPE[precision]
    short = {kv_dtype: kv_dtype.removeprefix("fp8_") for kv_dtype in KV_DTYPES}
    errors_of = [word for kv_dtype in KV_DTYPES for word in (short[kv_dtype], "best")]
    keys: list[tuple[str, ...]] = [("layer", "K amax", "outliers", "bias", *errors_of, "K treated", "gain")]
    values: list[tuple[str, ...]] = [
        ("layer", *(word for kv_dtype in KV_DTYPES for word in (f"V {short[kv_dtype]}", "rotated")))
    ]
    for number, layer in enumerate(calibration.layers):
        row = [str(number), f"{layer.key_amax:.1f}", f"{layer.key_outliers:.1f}", f"{layer.bias:.0%}"]
        for kv_dtype in KV_DTYPES:
            row += [
                f"{layer.key_errors[(kv_dtype, *TREATMENTS[0])]:.1e}",
                f"{layer.key_errors[(kv_dtype, *layer.treatment(kv_dtype))]:.1e}",
            ]
        treatment = layer.treatment(chosen)
        words = [word for word, on in zip(("Hadamard", "centred"), treatment, strict=True) if on]
        gain = layer.key_errors[(own, *TREATMENTS[0])] / max(layer.key_errors[(chosen, *treatment)], 1e-30)
        keys.append((*row, ", ".join(words) or "as it is", f"{gain:.2f}x"))
        pairs = [(kv_dtype, rotated) for kv_dtype in KV_DTYPES for rotated in (False, True)]
        values.append((str(number), *(f"{layer.value_errors[pair]:.1e}" for pair in pairs)))
    errors = ", ".join(f"{kv_dtype} {calibration.error(kv_dtype):.1e}" for kv_dtype in KV_DTYPES)
    modes = "\n".join(
        f"precision {each}: {_choice(calibration, each)}"
        for each in sorted(EIGHT_BITS, key=lambda name: name != precision)
    )
    return (
        f"{columns(keys, right={*range(1, 8), 9})}\n{columns(values, right=range(1, 5))}\n"
        f"error of attention, scores and values, each dtype at its best: {errors}\n{modes}"
    )


def _choice(calibration: Any, precision: str) -> str:
    """What a mode gets, in words, and whether rotated values are worth their while."""
    from ...runtime.engine.calibration import WORTH_DTYPE

    kv_dtype = calibration.kv_dtype(precision)
    treated = [layer.treatment(kv_dtype) for layer in calibration.layers]
    words = [f"kv_dtype={kv_dtype}"]
    for place, name in enumerate(("Hadamard", "keys centred")):
        layers = [str(number) for number, each in enumerate(treated) if each[place]]
        where = "all layers" if len(layers) == len(treated) else f"layers {', '.join(layers)}" if layers else "no layer"
        words.append(f"{name} in {where}")
    plain, rotated = calibration.value_error(kv_dtype, False), calibration.value_error(kv_dtype, True)
    advice = (
        f"; --rotate-values on brings the values' error from {plain:.1e} to {rotated:.1e}"
        if rotated < WORTH_DTYPE * plain
        else ""
    )
    return ", ".join(words) + advice
