"""What a model's authors want it sampled with: `SamplingDefaults`."""

from dataclasses import dataclass, fields
from typing import Any

from .sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingDefaults:
    """Fields of `SamplingParams` for requests that do not set them; None: the field's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    def params(self) -> SamplingParams:
        """Return the parameters of a request that sets none."""
        return SamplingParams(**self.given())
