"""Sampling defaults of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import RequestError
from .sampling_params import SamplingParams

FILE_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Sampling default in generation_config.json -> name in `SamplingParams`."""


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


def check_override(override: Any) -> None:
    """Raise RequestError unless the option `override_generation_config` maps FILE_FIELDS to valid values or None."""
    if not isinstance(override, Mapping):
        raise RequestError(f"{str(override)[:80]!r} must be a mapping such as {{'temperature': 0.7}}")
    for name, value in override.items():
        if name not in FILE_FIELDS:
            raise RequestError(f"{str(name)[:80]!r} is no sampling default; they are {', '.join(FILE_FIELDS)}")
        check_default(name, value)


def check_default(name: str, value: Any) -> None:
    """Raise RequestError for an invalid value of one of FILE_FIELDS. None is valid."""
    try:
        SamplingParams.from_optional(**{FILE_FIELDS[name]: value})
    except RequestError as problem:
        raise RequestError(str(problem).replace(f"{FILE_FIELDS[name]}=", f"{name}=", 1)) from None
