"""/health, /ready, /version."""

from typing import Literal

from msgspec import field

from .common import Answer


class Status(Answer, frozen=True, kw_only=True):
    """How the engines are. `progress` (0..1) and `phase` say more while they load; `engines`: each one's own."""

    status: Literal["loading", "ok", "stalled", "draining", "idle", "dead"]
    phase: str = ""
    progress: float = 0.0
    engines: dict[str, str] = field(default_factory=dict)


class Version(Answer, frozen=True, kw_only=True):
    """This package's release."""

    version: str
