"""Copies adapters from addresses such as s3://bucket/adapters/sql to this host, with fsspec.

Only addresses below a root of the server are read. The roots come from its operator, and names in them from clients.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ...compiler.program.cache_folder import cache_directory
from ...graphs.adapter_config import CONFIG
from ...graphs.adapter_names import MLX, PEFT
from ..api.errors import RequestError
from ..text.chat_files import CHAT_FILES

MAX_FILE_BYTES = {CONFIG: 1 << 20, PEFT.weights: 16 << 30, MLX.weights: 16 << 30, **CHAT_FILES}
"""Files of an adapter, with their largest sizes in bytes."""
COPY_BYTES = 1 << 22
_BELOW = re.compile(r"((?!\.)[A-Za-z0-9._-]+/?)+")  # neither `..`, nor `::`, with which fsspec chains file systems
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_remote(root: str) -> bool:
    """Return whether a root is an address."""
    return "://" in root


def absolute_root(root: str) -> str:
    """Return a root that does not depend on the working directory."""
    return root if is_remote(root) else str(Path(root).resolve())


def remote_address(path: str, roots: Iterable[str]) -> str | None:
    """Return the address of an adapter below one of the remote roots; None for other paths.

    A hub id such as org/name is the address hf://org/name, unless it is a directory of this host.
    """
    address = f"hf://{path}" if _HUB_ID.fullmatch(path) and not os.path.isdir(path) else path
    for root in filter(is_remote, roots):
        prefix = root if root.endswith("/") else f"{root}/"
        if address.startswith(prefix) and _BELOW.fullmatch(address.removeprefix(prefix)):
            return address
    return None


def copies_folder() -> Path:
    """Return the folder with the copies, shared by all servers of a user."""
    return cache_directory() / "remote_adapters"


def copy_adapter(name: str, address: str, into: Path) -> Path:
    """Copy the files of the adapter `name` into a folder of their version, unless it exists. Returns the folder.

    Raises RequestError if fsspec or its file system is missing, or if the files cannot be read.
    """
    try:
        import fsspec

        files, folder = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as problem:
        raise RequestError(f"adapter {name!r}: the server cannot read its address: {problem}") from None
    try:
        files.invalidate_cache()
        found = {file: limit for file, limit in MAX_FILE_BYTES.items() if files.exists(f"{folder}/{file}")}
        if CONFIG not in found or not {PEFT.weights, MLX.weights} & found.keys():
            raise FileNotFoundError(folder)
        stamp = [str(sorted(files.info(f"{folder}/{file}").items())) for file in found]
        target = into / hashlib.sha256("\n".join([address, *stamp]).encode()).hexdigest()
        if target.is_dir():
            return target
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="copy-", dir=into) as temporary:
            copied = Path(temporary, "adapter")
            copied.mkdir()
            for file, limit in found.items():
                with files.open(f"{folder}/{file}", "rb") as source, (copied / file).open("wb") as output:
                    while piece := source.read(COPY_BYTES):
                        if output.tell() + len(piece) > limit:
                            raise RequestError(f"adapter {name!r}: {file} has more than {limit} bytes")
                        output.write(piece)
            try:
                os.rename(copied, target)
            except OSError:
                if not target.is_dir():  # otherwise another server of this host was faster
                    raise
    except RequestError:
        raise
    except Exception as problem:  # fsspec file systems also raise the errors of their network libraries
        kind = type(problem).__name__
        raise RequestError(
            f"adapter {name!r}: {CONFIG} and {PEFT.weights} could not be read from its address ({kind}); check it, "
            "and the server's rights to read it"
        ) from problem
    return target
