"""What was found out about a compilation by running or compiling its kernels, apart from what is the same
everywhere: seconds, registers, shared memory.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .resources import Resources


class TimingsError(ValueError):
    """A file of timings is malformed."""


@dataclass(frozen=True)
class Timings:
    """The content of `timings.json`.

    passes     pass name -> seconds
    steps      program name -> (start, end) of each step in seconds, by index: one replay of `profile.capture_profile`
    resources  what the kernels take of the GPU
    device     on which the steps were measured: "cpu", or a GPU's name; "" when they were not, or it is not known
    """

    passes: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    device: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        steps = {name: [list(place) for place in places] for name, places in self.steps.items()}
        return {
            "passes": dict(self.passes),
            "steps": steps,
            "device": self.device,
            "kernels": self.resources.kernels,
            "resources": asdict(self.resources),
        }

    @staticmethod
    def load(path: str | Path) -> "Timings":
        """Reads a `timings.json`. Raises TimingsError when it is none, OSError when it can't be read."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise TimingsError(f"{path} is not JSON: {error}") from error
        fields = (
            {name: data.get(name, {}) for name in ("passes", "steps", "resources")} if isinstance(data, dict) else {}
        )
        well_formed = bool(fields) and all(isinstance(value, dict) for value in fields.values())
        places: list[Any] = (
            [place for steps in fields["steps"].values() for place in (steps if isinstance(steps, list) else [None])]
            if well_formed
            else []
        )
        resources = _resources(fields["resources"]) if well_formed else None
        if (
            resources is None
            or not _numbers(list(fields["passes"].values()))
            or not all(_numbers(place) and len(place) == 2 for place in places)
        ):
            wanted = '{"passes": {name: seconds}, "steps": {program: [[start, end], ...]}, "resources": {...}}'
            raise TimingsError(f"{path} holds no timings: expected {wanted}")
        return Timings(fields["passes"], fields["steps"], resources, str(data.get("device", ""))[:100])


def _resources(data: Mapping[str, Any]) -> Resources | None:
    """As `Resources` was written; None when it is malformed."""
    variants, launches = data.get("variants", []), data.get("launches", {})
    good = (
        isinstance(variants, list)
        and isinstance(launches, dict)
        and isinstance(data.get("refused", {}), dict)
        and all(
            isinstance(each, list)
            and len(each) == 2
            and isinstance(each[0], str)
            and isinstance(each[1], dict)
            and _numbers(list(each[1].values()))
            for each in variants
        )
    )
    steps: list[Any] = (
        [own for each in launches.values() for own in (each if isinstance(each, list) else [None])] if good else []
    )
    if not good or not all(_numbers(own) and all(number in range(len(variants)) for number in own) for own in steps):
        return None
    return Resources(
        str(data.get("target", "")), [(name, figures) for name, figures in variants], launches, data.get("refused", {})
    )


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, (int, float)) and not isinstance(each, bool) for each in value
    )
