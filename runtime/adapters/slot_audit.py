"""Compare adapter slots on the device with their blocks in host memory, one slot a minute.

A fault that writes into a slot, or a bit that flips there, would change answers without an error.
"""

import logging
import threading
import weakref
from typing import TYPE_CHECKING

import torch

from ..processes.threads import start_thread
from .host_memory import ALIGNMENT
from .packing import limit_torch_threads

if TYPE_CHECKING:
    from .slot_loader import SlotLoader

AUDIT_SECONDS = 60.0
_log = logging.getLogger(__name__)


def page_sums(memory: torch.Tensor) -> torch.Tensor:
    """Return the sums, modulo 2**64, of the 64-bit words of each ALIGNMENT bytes of uint8 memory: int64 [pages].

    A change of one word always changes a sum.
    """
    return memory.view(torch.int64).view(-1, ALIGNMENT // 8).sum(1)


def start_audit(loader: "SlotLoader", stopped: threading.Event) -> threading.Thread:
    """Start the thread that audits a loader's slots until `stopped` is set. It does not keep the loader alive."""
    return start_thread(_run, weakref.ref(loader), stopped, name="slot-audit", stop=stopped.set)


def _run(owner: "weakref.ref[SlotLoader]", stopped: threading.Event) -> None:
    limit_torch_threads()
    slot = -1
    while not stopped.wait(AUDIT_SECONDS):
        loader = owner()
        if loader is None:
            return
        slot = (slot + 1) % loader.lora.slots
        try:
            loader.audit(slot)
        except Exception:
            _log.exception("adapter slot %d could not be audited", slot)
        del loader
