"""Sampling defaults of a model."""

from dataclasses import dataclass, fields
from typing import Any

from .sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults for fields of `SamplingParams`; None: the field's own default."""

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
        """Return the parameters of a request without its own."""
        return SamplingParams(**self.given())
