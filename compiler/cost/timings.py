"""Measurements of a program's kernels, as a file: seconds, registers, shared memory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .kernel_resources import Resources


class TimingsError(ValueError):
    """A file of timings is malformed."""


@dataclass(frozen=True)
class Timings:
    """The content of `timings.json`.

    passes     pass name -> seconds
    steps      program name -> (start, end) of each step in seconds, in one replay of `profile.capture_profile`
    resources  resources of the kernels
    device     device of the steps: "cpu", or a GPU's name; "" if unknown
    """

    passes: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    device: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
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
        """Read a `timings.json`. Raises TimingsError for other content, and OSError."""
        try:
            timings = _decode(Path(path).read_bytes())
        except msgspec.ValidationError as error:
            raise TimingsError(f"{path} does not contain timings: {error}") from error
        except msgspec.DecodeError as error:
            raise TimingsError(f"{path} is not JSON: {error}") from error
        resources = timings.resources
        numbers = [number for steps in resources.launches.values() for step in steps for number in step]
        if any(number not in range(len(resources.variants)) for number in numbers):
            raise TimingsError(f"{path} does not contain valid timings: launches name missing variants")
        return timings


_decode = msgspec.json.Decoder(Timings).decode
