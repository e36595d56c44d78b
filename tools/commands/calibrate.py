"""`sidestream calibrate`: choose how a model's KV cache is quantized and its channels are smoothed.

With --round it also rounds the weights.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...compiler.options import DEFAULT_KV_DTYPE, EIGHT_BITS, NORM_ROTATIONS
from ...runtime.quantization.defaults import (
    CPU_LENGTH,
    CPU_TOKENS,
    FIGURE_TOKENS,
    FILE_NAME,
    LENGTH,
    ROUND_TOKENS,
    ROUNDED_FOR,
    file_name,
)
from ...runtime.quantization.texts import CHARACTERS_A_TOKEN, documents, standard_text
from ..options.engine import (
    adapters_of,
    add_command,
    add_lora_options,
    add_model,
    add_option,
    check_output,
    given,
    model_directory,
    positive,
    writing,
)
from ..options.models import load_model

DESCRIPTION = """\
Run a short text through the unquantized model, with the base and with each adapter, and measure every layer's queries,
keys and values:
  K amax, outliers   largest key, and its ratio to its head (1: flat, sqrt(head dim): a single channel)
  K bias             share of the keys' energy that is equal in all tokens, which centring removes
  int8, e4m3         error of the attention scores in nats with a cache of that type: with Hadamard (the default), and
                     with the best treatment
  V int8, V e4m3     relative error of attention's output for a value cache of that type, and with V rotated
                     (--rotate-values)
  K treated          choice for the layer in the mode of --precision: Hadamard, centring
  gain               error of the scores with that mode's own cache and Hadamard, divided by that of the choice
The largest value of every channel after each norm and before each down_proj sets the powers of two with which
`smooth_channels` scales channels to one size in int8 mode. The table does not show them; they gain most for models with
outlier channels.

The file has the keys' means, those powers and these figures, for int8 and fp8 mode alike. LLM(..., calibration=FILE)
and --calibration FILE use it to choose the type of kv_dtype "auto" (the mode's own type, int8 or e4m3, unless the other
one's error is far smaller), and the layers whose keys are transformed and centred. Engines find it as
sidestream_calibration.safetensors in the model's directory, the default of -o. Without a file "auto" is the mode's own
type, with Hadamard; an int8 engine on a GPU calibrates a model itself if that takes less than a minute.

--round also writes the weights in eight bits, rounded so that their products with this text change least (GPTQ):
sidestream_rounded_PRECISION.safetensors next to the calibration. They are valid for this checkpoint, this calibration
and these options, and are found in the model's directory (--rounded-weights names another file or switches them off).
For int8 the heads of V are rotated too, without an option at the server."""

EXAMPLES = """\
examples:
  sidestream calibrate                                                      the demo model and its adapters
  sidestream calibrate models/llama --lora-modules sql=adapters/sql --round
  sidestream calibrate models/llama --prompts corpus.txt --tokens 16384
  sidestream calibrate models/llama --round -o calibrated/llama.safetensors
  sidestream serve models/llama --calibration calibrated/llama.safetensors"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s [MODEL] [--lora-modules NAME=DIR ...] [--prompts FILE] [-o FILE]"
    parser = add_command(
        commands, "calibrate", "choose how a model's KV cache is quantized", DESCRIPTION, EXAMPLES, run, usage
    )
    add_model(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"(default: {FILE_NAME} in the model's directory)"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="UTF-8 text to run (default: sources of Python's standard library)"
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"tokens of text for the base; each adapter reads two pieces (default: {FIGURE_TOKENS}, "
        f"{ROUND_TOKENS} with --round, on a CPU {CPU_TOKENS})",
    )
    parser.add_argument(
        "--length", type=positive, metavar="N", help=f"tokens of a piece (default: {LENGTH}, on a CPU {CPU_LENGTH})"
    )
    parser.add_argument(
        "--precision",
        choices=EIGHT_BITS,
        default=EIGHT_BITS[0],
        help="mode of the table and of --round (default: %(default)s)",
    )
    parser.add_argument("--round", action="store_true", help="also round the weights (GPTQ)")
    add_option(
        parser,
        "norm_rotation",
        type=int,
        choices=NORM_ROTATIONS,
        help=f"with --round for int8: columns of a rotated block after norms (default: {ROUNDED_FOR['norm_rotation']})",
    )
    add_option(
        parser, "rotate_values", help="with --round for int8: rotate V: on, off, or layers such as 0,3-7 (default: on)"
    )
    add_option(parser, "device", choices=("cpu", "cuda"))
    add_lora_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the model twice over the text (means first, then errors), print the table, write the file."""
    directory = model_directory(options)
    names = list(adapters_of(options))
    output = options.output or (directory if options.model else Path()) / FILE_NAME
    check_output("--output", output)
    _check_rounded(options, output)
    for name in given(options, *ROUNDED_FOR):
        if not (options.round and options.precision == "int8"):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is an option of --round for int8; add --round, or leave it out")
    if options.prompts is not None and not options.prompts.is_file():
        raise ValueError(f"--prompts {options.prompts} is not a file; name a text file")
    if options.max_loras is not None and options.max_loras < len(names):
        raise ValueError(f"--max-loras {options.max_loras} has no room for all {len(names)} adapters; leave it out")
    import torch

    from ...graphs.checkpoint import Checkpoint
    from ...runtime.engine.resolve import resolve_device
    from ...runtime.quantization.calibration import fingerprint
    from ...runtime.quantization.model_statistics import calibrate
    from ...runtime.text.tokenizer import load_tokenizer

    device = resolve_device(options.device)
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(f"{directory} has no tokenizer; calibration runs text")
    model = load_model(options, directory, torch.bfloat16).to(device)
    tokens, length = ROUND_TOKENS if options.round else FIGURE_TOKENS, LENGTH
    if device.type == "cpu":
        tokens, length = CPU_TOKENS, CPU_LENGTH
    tokens, length = options.tokens or tokens, options.length or length
    text = standard_text() if options.prompts is None else options.prompts.read_text(encoding="utf-8")
    ids = tokenizer.encode(text[: tokens * CHARACTERS_A_TOKEN])[:tokens]
    jobs = list(documents(ids, min(length, model.config.max_position_embeddings), len(names)))
    if not jobs:
        raise ValueError(f"{options.prompts} has fewer than two tokens; give it some text")
    base_pieces = sum(slot < 0 for _, slot in jobs)
    # rounding reads more text than the figures, unless --tokens is given
    figured = base_pieces if options.tokens else min(base_pieces, max(FIGURE_TOKENS // length, 1))
    calibration = calibrate(
        model,
        jobs[:figured] + jobs[base_pieces:],
        device,
        fingerprint(model.config, Checkpoint(directory, model.config)),
        names,
        progress=sys.stderr.isatty(),
    )
    print(f"{directory.name}: {calibration.tokens} tokens, adapters: {', '.join(names) or 'none'}\n")
    print(as_text(calibration, options.precision))
    with writing(output):
        calibration.save(output)
    print(f"written to {output}")
    if options.round:
        del model  # the engine has the weights in eight bits
        rounded = output.absolute().parent / file_name(options.precision)
        _round(options, directory, rounded, calibration, jobs, progress=sys.stderr.isatty())
        print(f"rounded weights written to {rounded}")
    return 0


def _check_rounded(options: argparse.Namespace, output: Path) -> None:
    """Raise ValueError if existing rounded weights would not match the new calibration."""
    left = [output.parent / file_name(precision) for precision in EIGHT_BITS]
    left = [
        path for path in left if path.exists() and not (options.round and path.name == file_name(options.precision))
    ]
    if left and output.exists():
        raise ValueError(
            f"{left[0]} holds for the calibration that is there now, and engines would refuse it next to another: "
            "remove it or round it again with --round, or name another file with -o"
        )


def _round(
    options: argparse.Namespace,
    directory: Path,
    output: Path,
    calibration: Any,
    jobs: Sequence[tuple[list[int], int]],
    progress: bool,
) -> None:
    """Write the rounded weights; `jobs` is the text of the calibration."""
    from ...runtime.worker.calibrate.rounding import round_weights
    from ...runtime.worker.calibrate.scorer import Document

    adapters = adapters_of(options)
    names = [*adapters, None]  # slot -1 is the base model
    chosen: dict[str, Any] = {"precision": options.precision, "calibration": calibration, "device": options.device}
    if options.precision == "int8":
        chosen |= {**ROUNDED_FOR, **given(options, *ROUNDED_FOR)}
    texts = [Document(ids, names[slot]) for ids, slot in jobs]
    round_weights(directory, adapters, texts, chosen, output, _bar if progress else lambda stage: None)


def _bar(stage: str) -> None:
    print(f"\r{stage}\033[K", end="", file=sys.stderr, flush=True)


def as_text(calibration: Any, precision: str) -> str:
    """Return the table by layer with the choices for the mode `precision`, and the choices of each mode."""
    from ...compiler.pass_records import columns
    from ...runtime.quantization.calibration import KV_DTYPES, TREATMENTS

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
    """Return the choices of a mode in words, and whether to rotate values."""
    from ...runtime.quantization.calibration import MAX_DTYPE_ERROR

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
        if rotated < MAX_DTYPE_ERROR * plain
        else ""
    )
    return ", ".join(words) + advice
