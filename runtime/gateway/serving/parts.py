"""Engines, admission and observer, as the settings ask for them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..auth.admission import KeyAdmission, LoggedAdmission
from ..auth.keys import KeyBook
from ..auth.payloads import PayloadLog
from ..auth.usage_log import UsageLog
from ..contracts import Admission, Engines, Observer
from ..metrics.access_log import AccessLog
from ..metrics.listener import Listener
from ..metrics.metrics import Metrics
from ..metrics.tracing import Tracing, exporting_to
from ..metrics.watch import Watch
from ..router.router import Router
from ..settings import GatewaySettings
from .open_door import OpenDoor


@dataclass(frozen=True)
class Parts:
    """What the application stands on; `close` ends the threads of its logs."""

    engines: Engines
    admission: Admission
    observer: Observer
    close: Callable[[], None]


def make_parts(settings: GatewaySettings, engines: Engines | None = None) -> Parts:
    """`engines`: other ones than those at the settings' addresses. Raises ValueError for a file or an address that
    cannot be used.
    """
    engines = engines or Router(settings.engines, settings.engine_keys)
    book = None if settings.keys is None else KeyBook(Path(settings.keys))
    log = None if settings.usage_log is None else UsageLog(Path(settings.usage_log), days=settings.usage_days)
    closing: list[Callable[[], None]] = [] if log is None else [log.close]
    others: list[Listener] = []
    access = None
    if settings.access_log is not None:
        access = AccessLog(None if settings.access_log == "-" else Path(settings.access_log))
        closing.append(access.close)
        others.append(access)
    if settings.log_payloads and log is not None:
        others.append(PayloadLog(log))
    if settings.otel_endpoint is not None:
        tracing = Tracing(exporting_to(settings.otel_endpoint))
        closing.append(tracing.close)
        others.append(tracing)
    metrics = Metrics(vllm=settings.metrics_compat == "vllm", further=lambda: numbers(book, log, access))

    def close() -> None:
        for end in closing:
            end()

    return Parts(engines, _admission(settings, book, log), Watch(metrics, others), close)


def numbers(book: KeyBook | None, log: UsageLog | None, access: AccessLog | None) -> dict[str, int | float]:
    """What /metrics tells of the parts that there are."""
    found: dict[str, int | float] = {}
    if book is not None:
        found |= {
            "keys": len(book.keys),
            "keys_file_broken": bool(book.problem),
            "keys_file_failures_total": book.failures,
        }
    if log is not None:
        found |= {
            "usage_log_written_total": log.written,
            "usage_log_dropped_total": log.dropped,
            "usage_log_queued": log.queued,
            "usage_log_failing": bool(log.problem),
        }
    if access is not None:
        found["access_log_dropped_total"] = access.dropped
    return found


def _admission(settings: GatewaySettings, book: KeyBook | None, log: UsageLog | None) -> Admission:
    admission = OpenDoor(settings.api_key) if book is None else KeyAdmission(book, log)
    return admission if log is None else LoggedAdmission(admission, log)
