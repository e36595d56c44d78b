"""What makes a start quicker: a device that wakes up meanwhile, and no garbage collection over objects that all
stay.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def wake(device: torch.device) -> None:
    """Create a GPU's context on a thread of its own (it takes seconds); whoever needs the GPU first waits for it."""
    if device.type == "cuda":
        threading.Thread(target=torch.cuda.mem_get_info, args=(device,), name="wake-the-gpu", daemon=True).start()


@contextmanager
def collections_paused() -> Iterator[None]:
    """No cyclic garbage collection while a start builds some hundred thousand objects, all of which stay: they come
    to the oldest generation unseen.
    """
    enabled, others = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        yield
    finally:
        if not others:
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
