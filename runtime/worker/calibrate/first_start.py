"""An engine that starts with a model for the first time calibrates it, where that is soon done.

What it finds is kept next to the kept programs, in `calibrations`: a calibration and rounded weights for the base
model, under a key of the checkpoint's weights, the options that they hold for and the sources that make them, and the
digests of both. Deleting them is always safe.
"""

import gc
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ....compiler.pipeline import PASSES
from ....compiler.program.cache import source_hash
from ....compiler.program.cache_folder import CacheFolder, cache_directory
from ....graphs.checkpoint import Checkpoint, load_weights
from ....graphs.config import LlamaConfig
from ....graphs.llama import Llama
from ...engine.resolve import LoadOptions
from ...quantization import error_compensation
from ...quantization.calibration import Calibration, fingerprint
from ...quantization.defaults import FIGURE_TOKENS, LENGTH, ROUND_TOKENS, ROUNDED_FOR
from ...quantization.figures import calibrate
from ...quantization.file_names import AUTO, FILE_NAME, OFF, file_name
from ...quantization.rounded_weights import checkpoint_digest
from ...quantization.texts import CHARACTERS_A_TOKEN, documents, standard_text
from ...text.tokenizer import Tokenizer, load_tokenizer
from ..model import ModelSource
from ..progress import say, stage
from .reader import Document
from .rounding import ROW_ELEMENTS, round_weights

DEVICES = ("cuda",)  # on a CPU it takes minutes
MOST_SECONDS = 60.0
FEWEST_PARAMETERS = 64 << 20  # what is smaller is tried and tested with, not served
LIMIT = 32 << 30
"""Bytes of all that is kept; a model's part is as large as its weights in int8."""
SPARE_BYTES = 8 << 30  # of the GPU's memory, besides the weights: activations, sums and factors
# what calibrating takes on an H100: a start, each column that is rounded (a few launches), each byte that is read
START_SECONDS, COLUMN_SECONDS, BYTE_SECONDS = 15.0, 60e-6, 1e-9
_SOURCES = (Path(__file__).parent, Path(error_compensation.__file__).parent)


def with_calibration(source: ModelSource, options: LoadOptions) -> LoadOptions:
    """`options` with what was calibrated for this model at an earlier start, or is now; as they are where they name a
    calibration or switch it off, where the model's directory holds one, and where nothing is gained or it takes long.

    An int8 engine on one GPU does it. What goes wrong is said, and the start goes on without.
    """
    directory, config = source.directory, source.config
    if directory is None or not _wanted(directory, config, options):
        return options
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        return options
    shows, chosen = options.engine.show_progress, _rounded_for(options)
    folder = CacheFolder(cache_directory() / "calibrations", LIMIT)
    key = _key(directory, config, chosen)
    kept = _kept(folder, key)
    if kept is None:
        seconds, spare = estimated_seconds(config), _free_bytes(options.device) - 3 * _weight_bytes(config)
        if seconds > MOST_SECONDS or options.compiler.tensor_parallel > 1 or spare < SPARE_BYTES:
            say(
                f"not calibrated: `sidestream calibrate {directory} --round` brings int8 closer to 16 bits and takes "
                f"about {max(seconds, 60.0) / 60:.0f} min; calibration='off' says no more of it",
                shows,
            )
            return options
        begin = time.perf_counter()
        doing = f"calibrating, once for this model, about {seconds:.0f} s (calibration='off' leaves it out)"
        try:
            with stage(doing, shows):
                kept = _made(folder, key, source, options, tokenizer, chosen)
        except (OSError, RuntimeError, ValueError) as problem:  # the model can be served without
            said = " ".join(str(problem).split())[:200]
            say(f"not calibrated, and served without: {type(problem).__name__}: {said}", shows)
            return options
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        say(f"calibrated in {time.perf_counter() - begin:.0f} s", shows)
    calibration, rounded = kept
    weights = OFF if options.engine.rounded_weights == OFF else str(rounded)
    return replace(options, engine=replace(options.engine, calibration=str(calibration), rounded_weights=weights))


def estimated_seconds(config: LlamaConfig) -> float:
    """What calibrating a model takes on an H100, rounding included."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    linears = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    columns = config.num_hidden_layers * sum(map(_column_steps, linears)) + _column_steps((config.vocab_size, hidden))
    return START_SECONDS + COLUMN_SECONDS * columns + BYTE_SECONDS * 2 * _weight_bytes(config)


def _column_steps(shape: tuple[int, int]) -> int:
    rows, columns = shape
    return columns * -(-rows * columns // ROW_ELEMENTS)


def _parameters(config: LlamaConfig) -> int:
    layer = sum(rows * columns for rows, columns in map(config.module_shape, config.projections))
    vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_hidden_layers * layer + vocabulary


def _weight_bytes(config: LlamaConfig) -> int:
    return 2 * _parameters(config)


def _free_bytes(device: torch.device) -> int:
    """What is left of a GPU's memory."""
    return int(torch.cuda.mem_get_info(device)[0])


def _wanted(directory: Path, config: LlamaConfig, options: LoadOptions) -> bool:
    """Whether these options leave it to the engine, for a model that gains."""
    engine, compiler = options.engine, options.compiler
    return (
        options.device.type in DEVICES
        and compiler.precision == "int8"
        and engine.calibration in (None, AUTO)
        and engine.rounded_weights in (None, OFF)
        and options.passes == PASSES
        and not options.dummy
        and not config.weight_format
        and not (directory / FILE_NAME).exists()
        and not (directory / file_name(compiler.precision)).exists()
        and _parameters(config) >= FEWEST_PARAMETERS
    )


def _rounded_for(options: LoadOptions) -> dict[str, Any]:
    """Keywords of the engine that rounds: what the options say, and where they say nothing what rounds best."""
    compiler = options.compiler
    chosen: dict[str, Any] = {"precision": compiler.precision, "rotate_activations": compiler.rotate_activations}
    chosen |= {name: getattr(compiler, name) for name in ROUNDED_FOR}
    chosen |= {name: ROUNDED_FOR[name] for name in options.as_rounded}
    if not options.smooth_channels:
        chosen["smooth_channels"] = compiler.smooth_channels
    if compiler.disable:
        chosen["disable_passes"] = compiler.disable
    return chosen


def _key(directory: Path, config: LlamaConfig, chosen: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(checkpoint_digest(Checkpoint(directory, config)).encode())
    digest.update(fingerprint(config, Checkpoint(directory, config)).encode())
    digest.update(json.dumps(chosen, sort_keys=True).encode())
    digest.update(source_hash().encode())
    for path in sorted(path for folder in _SOURCES for path in folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _names(key: str) -> tuple[str, str, str]:
    """Of the files of the calibration, the rounded weights and both digests."""
    return f"{key}.{FILE_NAME}", f"{key}.{file_name('int8')}", f"{key}.sums"


def _kept(folder: CacheFolder, key: str) -> tuple[Path, Path] | None:
    """Both files, where they are whole."""
    *names, sums = _names(key)
    content = folder.recall(sums)
    if content is None:
        return None
    for name, wanted in zip(names, content.decode("ascii", "replace").split(), strict=False):
        with folder.reading(name) as handle:
            if handle is None:
                return None
            with open(handle, "rb", closefd=False) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted:
            folder.damaged(name, "its digest is wrong")
            return None
    calibration, rounded = (folder.directory / name for name in names)
    return calibration, rounded


def _made(
    folder: CacheFolder,
    key: str,
    source: ModelSource,
    options: LoadOptions,
    tokenizer: Tokenizer,
    chosen: Mapping[str, Any],
) -> tuple[Path, Path]:
    """Calibrate, and keep both files. Raises OSError, RuntimeError and ValueError."""
    config, directory = source.config, Path(str(source.directory))
    ids = tokenizer.encode(standard_text()[: ROUND_TOKENS * CHARACTERS_A_TOKEN])[:ROUND_TOKENS]
    jobs = list(documents(ids, min(LENGTH, config.max_position_embeddings), 0))
    if not jobs:
        raise ValueError("this Python has no sources of its library to read")
    found = figures(directory, config, jobs[: max(FIGURE_TOKENS // LENGTH, 1)], options.device)
    gc.collect()  # the plain model
    torch.cuda.empty_cache()
    texts = [Document(piece) for piece, _ in jobs]
    folder.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="making_", dir=folder.directory) as place:
        names = _names(key)
        made = [Path(place) / name for name in names[:2]]
        found.save(made[0])
        round_weights(directory, {}, texts, {**chosen, "calibration": found, "device": options.device}, made[1])
        sums = []
        for path, name in zip(made, names, strict=False):
            with path.open("rb") as file:
                sums.append(hashlib.file_digest(file, "sha256").hexdigest())
            path.chmod(0o600)
            path.replace(folder.directory / name)
    folder.keep(names[2], " ".join(sums).encode())
    calibration, rounded = (folder.directory / name for name in names[:2])
    return calibration, rounded


def figures(
    directory: Path, config: LlamaConfig, jobs: list[tuple[list[int], int]], device: torch.device
) -> Calibration:
    """The base model's calibration, of the unquantized model on `device`."""
    model = Llama(config, None, torch.bfloat16)
    checkpoint = Checkpoint(directory, config)
    checkpoint.validate(model.checkpoint_tensors(), config.tie_word_embeddings)
    load_weights(model, checkpoint)
    return calibrate(model.to(device), jobs, device, fingerprint(config, checkpoint), ())
