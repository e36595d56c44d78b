"""Directory of a named model or adapter: a path, or a hub id in the local hub cache. Nothing is downloaded."""

import os
import re
from itertools import islice
from pathlib import Path

from .adapter_config import CONFIG, AdapterError
from .adapter_names import MLX, PEFT
from .config_fields import ConfigError, read_json_object

SHOWN = 100  # maximum characters of a name in an error
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_.-]{1,96}")
WEIGHTS = PEFT.weights
_NEEDED = f"give the directory with {CONFIG} and {WEIGHTS}, as peft's save_pretrained writes it"
_FOLDER = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MOST_FOLDERS = 1000
_MOST_LISTED = 5


def model_directory(model: str | Path) -> Path:
    """Return the directory of a model: the path (`~` is the user's home), or the directory in the hub cache.

    Raises ConfigError, with the command to download or convert it, for a missing hub id, GGUF, a file or an adapter.
    """
    try:
        path = Path(model).expanduser()
        is_directory = path.is_dir()
    except (OSError, RuntimeError) as problem:  # too long, no permission, or an unknown `~name`
        shown = str(model) if len(str(model)) <= SHOWN else f"{str(model)[:SHOWN]}..."
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigError(f"model {shown!r} cannot be read ({reason}); name a directory or a hub id") from None
    if is_directory:
        _refuse_gguf(path, sorted(path.glob("*.gguf")))
        _refuse_adapter(path)
        return path
    if path.suffix == ".gguf":
        _refuse_gguf(path.parent, [path])
    if path.is_file():
        raise ConfigError(f"model {str(model)!r} is a file; name a directory in the Hugging Face format: {path.parent}")
    return cached_snapshot(str(model), "model", "config.json", ConfigError) if is_hub_id(model) else path


def adapter_directory(named: str | Path) -> Path:
    """Return the directory of an adapter, given as a directory, one of its files, or the hub id of a cached adapter.

    `~` is the user's home. Raises AdapterError for a directory without an adapter.
    """
    try:
        path = Path(named).expanduser()
        if is_hub_id(named) and not path.exists():
            path = cached_snapshot(str(named), "adapter", CONFIG, AdapterError)
        path = without_file_name(path)
        if not os.path.lexists(path / CONFIG):
            raise AdapterError(missing_adapter(path))
    except (OSError, RuntimeError) as problem:  # RuntimeError: an unknown `~name`
        reason = getattr(problem, "strerror", None) or problem
        raise AdapterError(f"adapter directory {str(named)[:200]} cannot be read ({reason}): {_NEEDED}") from None
    return path


def without_file_name(path: Path) -> Path:
    """Return the directory of an adapter's file; other paths unchanged."""
    return path.parent if path.name in (CONFIG, WEIGHTS, MLX.weights) and not path.is_dir() else path


def missing_adapter(path: Path) -> str:
    """Return the error for a path without adapter_config.json. It does not quote any file's content."""
    if not path.exists():
        return f"adapter directory {path} does not exist: {_NEEDED}"
    if not path.is_dir():
        return f"{path} is a file, not an adapter's directory: {_NEEDED}"
    folders = islice(path.iterdir(), _MOST_FOLDERS)
    named = sorted(each.name for each in folders if _FOLDER.fullmatch(each.name) and (each / CONFIG).is_file())
    if named:
        shown = ", ".join(named[:_MOST_LISTED]) + (", ..." if len(named) > _MOST_LISTED else "")
        return (
            f"{path} has no {CONFIG}, but there is one in its folder {shown}: peft's save_pretrained writes an adapter "
            f"into a folder of the adapter's name; give {path / named[0]}"
        )
    if (path / "config.json").is_file():
        return f"{path} contains a model (config.json), not an adapter: {_NEEDED}; serve this directory as the model"
    for name in (WEIGHTS, MLX.weights):
        if (path / name).exists():
            return f"{path} has {name}, but no {CONFIG}: copy that file there too; it contains the adapter's scaling"
    return f"{path / CONFIG} does not exist: {_NEEDED}"


def is_hub_id(named: str | Path) -> bool:
    """Return whether this can be the id of a hub repository; an existing path of the same form takes precedence."""
    return isinstance(named, str) and _HUB_ID.fullmatch(named) is not None and not Path(named).exists()


def cached_snapshot(name: str, kind: str, config: str, error: type[ValueError]) -> Path:
    """Return the newest files of a hub id in the local cache ($HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub).

    `kind`: "model" or "adapter"; `config`: a file that must exist. Raises `error`, with the command to download it.
    """
    from huggingface_hub import snapshot_download  # imported here: a start from a directory does not need it
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    local = f"{kind}s/{name.rpartition('/')[2]}"
    remedy = f"run `hf download {name} --local-dir {local}` and name {local}"
    try:
        found = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise error(
            f"{kind} {name!r} is neither a directory nor in the local hub cache (nothing is downloaded): {remedy}"
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(
            f"{kind} {name!r} cannot be read from the local hub cache ({problem}): check its permissions, or {remedy}"
        ) from None
    if not (found / config).is_file():
        raise error(f"{kind} {name!r} is in the local hub cache without its {config}: {remedy}")
    return found


def _refuse_adapter(directory: Path) -> None:
    """Raise ConfigError if the directory contains an adapter instead of a model."""
    if (directory / "config.json").is_file() or not (directory / CONFIG).is_file():
        return
    config = read_json_object(directory / CONFIG, ConfigError, "download it again")
    base = config.get("base_model_name_or_path")
    of = f" of {base[:SHOWN]!r}" if isinstance(base, str) and base else ""
    raise ConfigError(
        f"{directory} is a LoRA adapter{of}, not a model: name its base as the model, and add "
        f"adapters={{'{directory.absolute().name}': '{directory}'}}"
    )


def _refuse_gguf(directory: Path, files: list[Path]) -> None:
    """Raise ConfigError for a model that exists only as GGUF."""
    if not files or (directory / "config.json").is_file():
        return
    raise ConfigError(
        f"{files[0].name} is GGUF (blocks of four to eight bits), which is not served: convert it with "
        f'`python -c "{_in_quotes(gguf_conversion(directory, files[0].name))}"` (pip install transformers gguf) and '
        "name the directory `converted`"
    )


def gguf_conversion(directory: Path, file: str) -> str:
    """Return Python code that converts a GGUF file to a checkpoint, `converted`.

    transformers 4 always unpacks the blocks; 5 does it on request, and saves the model after its quantization_config is
    removed.
    """
    return (
        f"import transformers as t; d, g = {str(directory)!r}, dict(gguf_file={file!r}); "
        "c = getattr(t, 'GgufConfig', None); u = {'quantization_config': c(dequantize=True)} if c else {}; "
        "m = t.AutoModelForCausalLM.from_pretrained(d, **g, **u); q = getattr(m, 'hf_quantizer', None); "
        "q and q.remove_quantization_config(m); m.save_pretrained('converted'); "
        "t.AutoTokenizer.from_pretrained(d, **g).save_pretrained('converted')"
    )


def _in_quotes(code: str) -> str:
    """Return code escaped for a shell's double quotes."""
    return re.sub(r'(["$`\\])', r"\\\1", code)
