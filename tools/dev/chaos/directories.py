"""Hostile adapter directories: each must be answered in time, nearly all with an error, and do no other harm."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....runtime.api.errors import RequestError, ServerError
from ....runtime.client.client import Client

CALL_SECONDS = 20.0


def _config(folder: Path, **changes: Any) -> None:
    given = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps(given | changes), encoding="utf-8")


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def _weights(folder: Path, header: bytes, length: int | None = None) -> None:
    stated = len(header) if length is None else length
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", stated) + header)


def _many_entries(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    _weights(folder, json.dumps({f"base_model.model.x{index}": entry for index in range(100_000)}).encode())


def _nested(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[" * 100_000, encoding="utf-8")


TRAPS: dict[str, Callable[[Path], None]] = {
    "a pattern that backtracks": lambda folder: _config(folder, target_modules=".?" * 120 + "Z"),
    "many patterns": lambda folder: _config(folder, target_modules=[".*.*.*.*.*Z"] * 2000),
    "a config without end": lambda folder: _replace(
        folder / "adapter_config.json", lambda path: path.symlink_to("/dev/zero")
    ),
    "weights that are a pipe": lambda folder: _replace(folder / "adapter_model.safetensors", os.mkfifo),
    "a link out of the root": lambda folder: _replace(
        folder / "adapter_config.json", lambda path: path.symlink_to("/etc/passwd")
    ),
    "a link to itself": lambda folder: _replace(folder / "adapter_config.json", lambda path: path.symlink_to(path)),
    "a header of many entries": _many_entries,
    "a header that is longer than the file": lambda folder: _weights(folder, b"{}", 1 << 62),
    "a header that is no JSON": lambda folder: _weights(folder, b"\xff" * 64),
    "nested JSON": _nested,
    "a number without end": lambda folder: _config(folder, r=10**400),
    "rank zero": lambda folder: _config(folder, r=0),
    "another kind of adapter": lambda folder: _config(folder, use_dora=True),
    "half of the weights": lambda folder: os.truncate(folder / "adapter_model.safetensors", 4096),
}
MAY_LOAD = ("a pattern that backtracks", "many patterns")
"""Patterns that are slow to match but valid, since an adapter's tensors name its targets."""


def hostile_directories(address: str, root: Path, honest: Path, source: random.Random) -> tuple[int, list[str]]:
    """Load every trap under its own name; return the attempts, and traps that were accepted or not answered in time.

    `honest` is an adapter's directory to make traps of; they are below `root`, from which loading is allowed.
    """
    surprises = []
    for title, make in source.sample(list(TRAPS.items()), len(TRAPS)):
        folder = root / f"trap{source.randrange(1 << 30)}"
        shutil.copytree(honest, folder)
        make(folder)
        try:
            with Client(address, call_timeout=CALL_SECONDS) as client:
                client.load_adapter(folder.name, folder)
                client.unload_adapter(folder.name)
                if title not in MAY_LOAD:
                    surprises.append(f"{title}: loaded")
        except TimeoutError:
            surprises.append(f"{title}: no answer within {CALL_SECONDS:g} s")
        except (RequestError, ServerError) as problem:
            if "root:" in str(problem):
                surprises.append(f"{title}: the error quotes the file: {problem}")
        finally:
            shutil.rmtree(folder)
    return len(TRAPS), surprises
