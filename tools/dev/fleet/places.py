"""A directory for the sockets, the cache and the token of a script's Ray."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_places() -> Iterator[Path]:
    """Yield the directory, and remove it at the end; enter before Ray is imported.

    Processes get one thread each unless OMP_NUM_THREADS is set, since several share the processors.
    """
    with tempfile.TemporaryDirectory(prefix="ssf-") as folder:
        os.environ |= {
            "RAY_AUTH_TOKEN_PATH": f"{folder}/token",
            "SIDESTREAM_CACHE": f"{folder}/cache",
            "XDG_RUNTIME_DIR": folder,
        }
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from ....runtime.fleet.cluster import secure

        secure()
        yield Path(folder)
