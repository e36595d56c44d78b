"""The directory of a model that was named: a path, or a hub id whose files lie in the local hub cache. Nothing is
downloaded.
"""

import re
from pathlib import Path

from .config_fields import ConfigError

SHOWN = 100  # characters of a name that an error quotes
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_.-]{1,96}")


def model_directory(model: str | Path) -> Path:
    """Where the files of a model lie: the path itself, or the hub cache's directory. Raises ConfigError, which says how
    to download or convert, for a hub id that is not there and for GGUF.
    """
    path = Path(model)
    try:
        is_directory = path.is_dir()
    except OSError as problem:  # a name that is too long, or a directory that may not be entered
        shown = str(model) if len(str(model)) <= SHOWN else f"{str(model)[:SHOWN]}..."
        raise ConfigError(
            f"model {shown!r} cannot be read ({problem.strerror}); name a directory or a hub id"
        ) from None
    if is_directory:
        _refuse_gguf(path, sorted(path.glob("*.gguf")))
        return path
    if path.suffix == ".gguf":
        _refuse_gguf(path.parent, [path])
    return _cached(model) if isinstance(model, str) and _HUB_ID.fullmatch(model) and not path.exists() else path


def _cached(name: str) -> Path:
    """The newest files of a hub id in the local cache ($HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub)."""
    from huggingface_hub import snapshot_download  # comes with tokenizers; a start from a directory does without it
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    local = f"models/{name.rpartition('/')[2]}"
    remedy = f"run `hf download {name} --local-dir {local}` and name {local}"
    try:
        found = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            f"model {name!r} is neither a directory nor in the local hub cache (nothing is downloaded): {remedy}"
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"model {name!r} cannot be read from the local hub cache ({problem}): check its permissions, or {remedy}"
        ) from None
    if not (found / "config.json").is_file():
        raise ConfigError(f"model {name!r} lies in the local hub cache without its config.json: {remedy}")
    return found


def _refuse_gguf(directory: Path, files: list[Path]) -> None:
    """Raises for a model that is there as GGUF only."""
    if not files or (directory / "config.json").is_file():
        return
    where = f"{str(directory)!r}, gguf_file={files[0].name!r}"
    raise ConfigError(
        f"{files[0].name} is GGUF, whose blocks of four to eight bits are not served: convert it with `python -c "
        '"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[C.from_pretrained({where}).save_pretrained('converted') for C in (M, T)]\"` (pip install transformers gguf) "
        "and name the directory `converted`"
    )
