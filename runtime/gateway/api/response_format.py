"""Constraints on the answer in bodies: `response_format`, and vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from ...api.errors import RequestError
from ...api.structured_outputs import StructuredOutputsParams
from ..interfaces import GatewayError
from .body_types import Body, Ignored, Text

Schema = dict[str, Any] | bool


class JsonSchemaFormat(Body, frozen=True, kw_only=True):
    """A named schema. Answers match it even if `strict` is false."""

    name: Annotated[str, Meta(max_length=256)]
    schema: Schema | None = None
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(Body, frozen=True, kw_only=True):
    """Any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsBody(Body, frozen=True, kw_only=True):
    """vLLM's format. Exactly one of the first five fields must be set."""

    json: Schema | Text | None = None
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_fallback: Ignored = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Text | None = None


def schema_of(form: ResponseFormat | None) -> Schema | None:
    """Return the JSON schema of a `response_format`; None for any text. Raises GatewayError 400."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None or form.json_schema.schema is None:
        raise GatewayError(
            400, "response_format.json_schema.schema is missing; give a JSON schema", param="response_format"
        )
    return form.json_schema.schema


def constraint_of(form: ResponseFormat | None, outputs: StructuredOutputsBody | None) -> StructuredOutputsParams | None:
    """Return the constraint on the answer, if any. Raises GatewayError 400 that names the field."""
    schema = schema_of(form)
    if outputs is None:
        return None if schema is None else make_constraint("response_format", json=schema)
    if schema is not None:
        raise GatewayError(
            400, "response_format and structured_outputs exclude each other; give one", param="structured_outputs"
        )
    given = {name: getattr(outputs, name) for name in outputs.__struct_fields__ if name != "disable_fallback"}
    return make_constraint("structured_outputs", **{name: value for name, value in given.items() if value is not None})


def make_constraint(field: str, **constraint: Any) -> StructuredOutputsParams:
    """Return the constraint that `field` of a body sets. Raises GatewayError 400 that names the field."""
    try:
        return StructuredOutputsParams(**constraint)
    except RequestError as problem:
        raise GatewayError(400, name_constraint_field(field, str(problem)), param=field) from None


def name_constraint_field(field: str, message: str) -> str:
    """Replace `structured_outputs` at the start of an error message by the field of the body that sets it."""
    if field == "structured_outputs" or not message.startswith("structured_outputs"):
        return message
    _, _, rest = message.partition(" ")
    return f"{field} {rest}"
