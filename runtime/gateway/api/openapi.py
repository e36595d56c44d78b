"""The OpenAPI document, generated from the structs of the bodies."""

from typing import Any, NamedTuple

import msgspec

from .chat import ChatChunk, ChatCompletion, ChatRequest
from .completions import Completion, CompletionRequest
from .errors import ErrorBody
from .health import Status, Version
from .models import AdapterChanged, LoadAdapter, ModelCard, ModelList, UnloadAdapter
from .responses import Response, ResponseEvent, ResponseRequest
from .tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

_REF = "#/components/schemas/{name}"
_EVENT = {
    "type": "object",
    "description": "one event; data is JSON, or [DONE] at the end",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}


class Endpoint(NamedTuple):
    """One operation.

    request_body, response   structs of the bodies
    event                    struct of an event of the stream
    open                     whether it needs no key
    text                     content type of a plain text response
    """

    method: str
    path: str
    summary: str
    request_body: type | None = None
    response: type | None = None
    event: type | None = None
    open: bool = False
    text: str = ""


ENDPOINTS = (
    Endpoint("post", "/v1/chat/completions", "Answer a conversation", ChatRequest, ChatCompletion, ChatChunk),
    Endpoint("post", "/v1/completions", "Continue prompts", CompletionRequest, Completion, Completion),
    Endpoint("post", "/v1/responses", "Answer a conversation", ResponseRequest, Response, ResponseEvent),
    Endpoint("get", "/v1/models", "The base model and its adapters", None, ModelList),
    Endpoint("get", "/v1/models/{model}", "The base model or one adapter", None, ModelCard),
    Endpoint("post", "/v1/load_lora_adapter", "Load an adapter (admin)", LoadAdapter, AdapterChanged),
    Endpoint("post", "/v1/unload_lora_adapter", "Unload an adapter (admin)", UnloadAdapter, AdapterChanged),
    Endpoint("post", "/tokenize", "Token ids of a text or a conversation", TokenizeRequest, Tokenized),
    Endpoint("post", "/detokenize", "Text of token ids", DetokenizeRequest, Detokenized),
    Endpoint("get", "/health", "Whether an engine is alive", None, Status, open=True),
    Endpoint("get", "/ready", "Whether requests are accepted", None, Status, open=True),
    Endpoint("get", "/version", "The release", None, Version),
    Endpoint("get", "/metrics", "Counters and gauges for Prometheus", text="text/plain"),
    Endpoint("get", "/docs", "This document as a page", open=True, text="text/html"),
    Endpoint("get", "/openapi.json", "This document", open=True),
    Endpoint("get", "/", "The console: a page for people", open=True, text="text/html"),
)


def openapi_document(version: str) -> dict[str, Any]:
    """Return the document for a release."""
    types = {kind for each in ENDPOINTS for kind in (each.request_body, each.response, each.event) if kind is not None}
    ordered = sorted(types | {ErrorBody}, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    refs = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in ENDPOINTS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sidestream", "version": version, "description": "LoRA fine-tunes of one base model."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(each: Endpoint, refs: dict[type, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if each.text:
        content[each.text] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": {"type": "object"} if each.response is None else refs[each.response]}
    if each.event is not None:
        content["text/event-stream"] = {"schema": _EVENT, "x-data": refs[each.event]}
    problem = {"application/json": {"schema": refs[ErrorBody]}}
    operation: dict[str, Any] = {
        "summary": each.summary,
        "operationId": each.path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_"),
        "responses": {
            "200": {"description": "the response", "content": content},
            "default": {"description": "the error", "content": problem},
        },
        "security": [{}] if each.open else [{"key": []}, {}],
    }
    if each.response is Status:
        operation["responses"]["503"] = {"description": "the status is bad", "content": content}
    if each.request_body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[each.request_body]}},
        }
    if "{model}" in each.path:
        schema = {"type": "string", "minLength": 1, "maxLength": 256}
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schema}]
    return operation
