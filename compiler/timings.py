"""What was measured about a compilation, apart from everything that is the same at each run: seconds of passes and steps, what kernels take of the GPU."""
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class TimingsError(ValueError):
    """A file of timings is malformed."""


@dataclass(frozen=True)
class Timings:
    """The content of `timings.json`.

    passes   pass name -> seconds
    steps    program name -> (start, end) of each step in seconds, by index: one replay of `profile.capture_profile`
    kernels  kernel name (`ops.rms_norm._rms_norm_kernel`) -> registers, spills, shared_bytes
    """

    passes: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        steps = {name: [list(place) for place in places] for name, places in self.steps.items()}
        return {"passes": dict(self.passes), "steps": steps, "kernels": {name: dict(entry) for name, entry in self.kernels.items()}}

    @staticmethod
    def load(path: str | Path) -> "Timings":
        """Reads a `timings.json`. Raises TimingsError when it is none, OSError when it can't be read."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise TimingsError(f"{path} is not JSON: {error}") from error
        fields = {name: data.get(name, {}) for name in ("passes", "steps", "kernels")} if isinstance(data, dict) else {}
        well_formed = bool(fields) and all(isinstance(value, dict) for value in fields.values())
        places: list[Any] = [place for steps in fields["steps"].values() for place in (steps if isinstance(steps, list) else [None])] if well_formed else []
        if not well_formed or not _numbers(list(fields["passes"].values())) or not all(_numbers(place) and len(place) == 2 for place in places):
            wanted = '{"passes": {name: seconds}, "steps": {program: [[start, end], ...]}, "kernels": {...}}'
            raise TimingsError(f"{path} holds no timings: expected {wanted}")
        return Timings(**fields)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in value)
