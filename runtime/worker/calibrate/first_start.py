"""Calibrate a model automatically when an engine first starts with it, if that takes less than a minute.

The folder `calibrations` of the cache directory then has a calibration and rounded weights for the base model, and
their digests, under a key of the checkpoint's weights, the options and the sources. Deleting them is always safe.
"""

import fcntl
import gc
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from ...quantization.defaults import AUTO, FIGURE_TOKENS, FILE_NAME, LENGTH, OFF, ROUND_TOKENS, ROUNDED_FOR, file_name
from ...quantization.model_statistics import calibrate
from ...quantization.rounded_weights import checkpoint_digest
from ...quantization.texts import CHARACTERS_A_TOKEN, documents, standard_text
from ...text.tokenizer import Tokenizer, load_tokenizer
from ..model import ModelSource
from ..progress import print_line, stage
from .rounding import ROW_ELEMENTS, round_weights
from .scorer import Document

DEVICES = ("cuda",)  # on a CPU it takes minutes
MAX_SECONDS = 60.0
MIN_PARAMETERS = 64 << 20  # smaller models are for tests
MAX_CACHE_BYTES = 32 << 30  # each model adds the size of its weights in int8
SPARE_BYTES = 8 << 30  # of the GPU's memory besides the weights: activations, sums and factors
# on an H100: a start, each rounded column (a few launches), each byte read
START_SECONDS, COLUMN_SECONDS, BYTE_SECONDS = 15.0, 60e-6, 1e-9
_SOURCES = (Path(__file__).parent, Path(error_compensation.__file__).parent)


def calibrate_at_first_start(source: ModelSource, options: LoadOptions) -> LoadOptions:
    """Return `options` with the model's cached or new calibration, for an int8 engine on one GPU.

    The options are returned unchanged if they set `calibration`, if the model's directory has one, or if calibrating
    takes too long. An error is printed, and the start continues without a calibration.
    """
    directory, config = source.directory, source.config
    if directory is None or not _is_enabled(directory, config, options):
        return options
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        return options
    show, keywords = options.engine.show_progress, _rounding_keywords(options)
    folder = CacheFolder(cache_directory() / "calibrations", MAX_CACHE_BYTES)
    key = _cache_key(directory, config, keywords)
    files = _find(folder, key)
    if files is None:
        seconds, spare = estimate_seconds(config), _free_bytes(options.device) - 3 * _weight_bytes(config)
        if seconds > MAX_SECONDS or options.compiler.tensor_parallel > 1 or spare < SPARE_BYTES:
            print_line(
                f"not calibrated: `sidestream calibrate {directory} --round` makes int8 more accurate and takes "
                f"about {max(seconds, 60.0) / 60:.0f} min; calibration='off' hides this message",
                show,
            )
            return options
        begin = time.perf_counter()
        doing = f"calibrating, once for this model, about {seconds:.0f} s (calibration='off' disables it)"
        try:
            with stage(doing, show), _alone(folder):  # engines of one server must use the same calibration
                files = _find(folder, key) or _calibrate(folder, key, source, options, tokenizer, keywords)
        except (OSError, RuntimeError, ValueError) as error:  # the model works without
            text = " ".join(str(error).split())[:200]
            print_line(f"not calibrated, and served without a calibration: {type(error).__name__}: {text}", show)
            return options
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        print_line(f"calibrated in {time.perf_counter() - begin:.0f} s", show)
    calibration, rounded = files
    weights = OFF if options.engine.rounded_weights == OFF else str(rounded)
    return replace(options, engine=replace(options.engine, calibration=str(calibration), rounded_weights=weights))


def estimate_seconds(config: LlamaConfig) -> float:
    """Return the estimated seconds for calibrating and rounding a model on an H100."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    attention, mlp = [(queries + 2 * keys, hidden), (hidden, queries)], [(2 * inner, hidden), (hidden, inner)]
    columns = config.num_hidden_layers * sum(map(_column_steps, attention)) + _column_steps((config.vocab_size, hidden))
    columns += (config.num_hidden_layers - config.num_sparse_layers) * sum(map(_column_steps, mlp))
    return START_SECONDS + COLUMN_SECONDS * columns + BYTE_SECONDS * 2 * _weight_bytes(config)


def _column_steps(shape: tuple[int, int]) -> int:
    rows, columns = shape
    return columns * -(-rows * columns // ROW_ELEMENTS)


def _parameters(config: LlamaConfig) -> int:
    linears = sum(rows * columns for rows, columns in map(config.module_shape, config.linear_modules()))
    experts = config.num_sparse_layers * config.num_experts * 3 * config.hidden_size * config.expert_intermediate_size
    vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return linears + experts + vocabulary


def _weight_bytes(config: LlamaConfig) -> int:
    return 2 * _parameters(config)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def _is_enabled(directory: Path, config: LlamaConfig, options: LoadOptions) -> bool:
    """Return whether the options let the engine calibrate, and the model is large enough to benefit."""
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
        and _parameters(config) >= MIN_PARAMETERS
    )


def _rounding_keywords(options: LoadOptions) -> dict[str, Any]:
    """Return the keywords of the engine that rounds: the given options, and the most accurate values for all others."""
    compiler = options.compiler
    keywords: dict[str, Any] = {"precision": compiler.precision, "rotate_activations": compiler.rotate_activations}
    keywords |= {name: getattr(compiler, name) for name in ROUNDED_FOR}
    keywords |= {name: ROUNDED_FOR[name] for name in options.as_rounded}
    if not options.smooth_channels:
        keywords["smooth_channels"] = compiler.smooth_channels
    if compiler.disable:
        keywords["disable_passes"] = compiler.disable
    return keywords


def _cache_key(directory: Path, config: LlamaConfig, keywords: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(checkpoint_digest(Checkpoint(directory, config)).encode())
    digest.update(fingerprint(config, Checkpoint(directory, config)).encode())
    digest.update(json.dumps(keywords, sort_keys=True).encode())
    digest.update(source_hash().encode())
    for path in sorted(path for folder in _SOURCES for path in folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _file_names(key: str) -> tuple[str, str, str]:
    """Return the names of the calibration, the rounded weights and their digests."""
    return f"{key}.{FILE_NAME}", f"{key}.{file_name('int8')}", f"{key}.sums"


@contextmanager
def _alone(folder: CacheFolder) -> Iterator[None]:
    """Wait until no other process calibrates. The kernel releases the lock of a process that ends. Raises OSError."""
    folder.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _find(folder: CacheFolder, key: str) -> tuple[Path, Path] | None:
    """Return both cached files, if their digests are right."""
    *names, sums = _file_names(key)
    content = folder.recall(sums)
    if content is None:
        return None
    for name, wanted in zip(names, content.decode("ascii", "replace").split(), strict=False):
        with folder.reading(name) as handle:
            if handle is None:
                return None
            try:
                with open(handle, "rb", closefd=False) as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                found = str(error)
        if found != wanted:
            folder.damaged(name, "its digest is wrong")
            return None
    calibration, rounded = (folder.directory / name for name in names)
    return calibration, rounded


def _calibrate(
    folder: CacheFolder,
    key: str,
    source: ModelSource,
    options: LoadOptions,
    tokenizer: Tokenizer,
    keywords: Mapping[str, Any],
) -> tuple[Path, Path]:
    """Calibrate, round, and cache both files. Raises OSError, RuntimeError and ValueError."""
    config, directory = source.config, Path(str(source.directory))
    ids = tokenizer.encode(standard_text()[: ROUND_TOKENS * CHARACTERS_A_TOKEN])[:ROUND_TOKENS]
    jobs = list(documents(ids, min(LENGTH, config.max_position_embeddings), 0))
    if not jobs:
        raise ValueError("this Python has no source files of its library to calibrate with")
    calibration = calibrate_base_model(directory, config, jobs[: max(FIGURE_TOKENS // LENGTH, 1)], options.device)
    gc.collect()  # frees the unquantized model
    torch.cuda.empty_cache()
    texts = [Document(tokens) for tokens, _ in jobs]
    folder.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="making_", dir=folder.directory) as temporary:
        names = _file_names(key)
        paths = [Path(temporary) / name for name in names[:2]]
        calibration.save(paths[0])
        engine = {**keywords, "calibration": calibration, "device": options.device}
        round_weights(directory, {}, texts, engine, paths[1])
        sums = []
        for path, name in zip(paths, names, strict=False):
            with path.open("rb") as file:
                sums.append(hashlib.file_digest(file, "sha256").hexdigest())
            path.chmod(0o600)
            path.replace(folder.directory / name)
    folder.keep(names[2], " ".join(sums).encode())
    return folder.directory / names[0], folder.directory / names[1]


def calibrate_base_model(
    directory: Path, config: LlamaConfig, jobs: list[tuple[list[int], int]], device: torch.device
) -> Calibration:
    """Return the base model's calibration, computed by the unquantized model on `device`."""
    model = Llama(config, None, torch.bfloat16)
    checkpoint = Checkpoint(directory, config)
    checkpoint.validate(model.checkpoint_tensors(), config.tie_word_embeddings)
    load_weights(model, checkpoint)
    return calibrate(model.to(device), jobs, device, fingerprint(config, checkpoint), ())
