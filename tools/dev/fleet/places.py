"""A directory of its own for the sockets, the cache and the token of a Ray that a script starts."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_places() -> Iterator[Path]:
    """The directory; it goes in the end. To be entered before Ray is imported. The processes have one thread each for
    their mathematics, unless OMP_NUM_THREADS says otherwise: several of them share the processors.
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
