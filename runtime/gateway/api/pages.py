"""/openapi.json, generated from the structs of the bodies; /docs, the same as a page; / (the console)."""

import base64
import functools
import hashlib
import re
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .... import __version__
from ...api.adapter_update import INFLIGHT
from ..interfaces import HistoryReport
from .anthropic.message_events import Message, MessageEvent
from .anthropic.messages import CountTokensRequest, MessagesRequest, TokensCounted
from .chat.answer import ChatChunk, ChatCompletion
from .chat.request import ChatRequest
from .completions import Completion, CompletionRequest
from .context import GatewayContext
from .errors import AnthropicErrorBody, ErrorBody
from .health import Load, PauseChanged, Paused, ServerInfo, Status, Version, WorldSize
from .models import AdaptersChanged, AdapterUpdated, LoadAdapter, ModelCard, ModelList, UnloadAdapter
from .responses.output import Response as ModelResponse
from .responses.output import ResponseEvent
from .responses.request import ResponseRequest
from .score import ScoreBody, Scores
from .vllm.batch import BatchChatRequest
from .vllm.generative_scoring import GenerativeScoringBody, ItemScores
from .vllm.render import RenderedPrompt
from .vllm.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest, TokenizerInfo

PACKAGE = __name__.partition(".runtime.")[0]

SHARED = ("look.css", "dom.js", "tabs.js")
"""Files of the page of `sidestream inspect dump`, read as files since importing the compiler would load torch."""
SCRIPTS = (
    "dom.js",
    "tabs.js",
    "connection.js",
    "metrics.js",
    "live.js",
    "tables.js",
    "day.js",
    "playground.js",
    "main.js",
)
STYLES = ("look.css", "console.css")
_REF = "#/components/schemas/{name}"
_EVENT = {
    "type": "object",
    "description": "one event; data is JSON, or [DONE] at the end",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Sidestream {{ version }}: endpoints</title>
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 } code, td { font-family: ui-monospace, monospace; font-size: 13px }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #8884; padding: .2rem .6rem .2rem 0; vertical-align: top }
</style>
<h1>Sidestream {{ version }}</h1>
<p>Compatible with OpenAI, vLLM and Anthropic; <a href="openapi.json">openapi.json</a> is the same for programs.</p>
{% for each in endpoints %}
<details><summary><b>{{ each.method.upper() }}</b> <code>{{ each.path }}</code> {{ each.summary }}</summary>
{% if each.request_body %}<table>
{% for name, kind in fields[each.request_body.__name__] %}<tr><td>{{ name }}<td>{{ kind }}
{% endfor %}</table>{% endif %}
</details>
{% endfor %}
</html>
"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}


@functools.cache
def console_page() -> tuple[bytes, dict[str, str]]:
    """Return the page in UTF-8, and headers that allow only its own script and style and forbid all loads."""
    style, script = ("\n".join(map(read_file, names)) for names in (STYLES, SCRIPTS))
    page = read_file("console.html").replace("<!--VERSION-->", __version__)
    page = page.replace("<!--STYLE-->", style, 1).replace("<!--SCRIPT-->", script, 1)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src '{_policy_hash(style)}'; "
        f"script-src '{_policy_hash(script)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page.encode(), headers


def read_file(name: str) -> str:
    """Return the text of one file of the page."""
    root = files(PACKAGE)
    folder = ("compiler", "inspect", "page") if name in SHARED else ("runtime", "gateway", "console")
    return root.joinpath(*folder, name).read_text(encoding="utf-8")


def _policy_hash(text: str) -> str:
    """Return the hash of an element's text for a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class Endpoint(NamedTuple):
    """One operation.

    request_body, response   structs of the bodies
    event                    struct of an event of the stream
    problem                  struct of an error
    open                     needs no key
    text                     content type of a plain text response
    """

    method: str
    path: str
    summary: str
    request_body: type | None = None
    response: type | None = None
    event: type | None = None
    problem: type = ErrorBody
    open: bool = False
    text: str = ""


ENDPOINTS = (
    Endpoint("post", "/v1/chat/completions", "Answer a conversation", ChatRequest, ChatCompletion, ChatChunk),
    Endpoint("post", "/v1/chat/completions/batch", "Answer several conversations", BatchChatRequest, ChatCompletion),
    Endpoint("post", "/v1/chat/completions/render", "The tokens of its prompt", ChatRequest, RenderedPrompt),
    Endpoint("post", "/v1/completions/render", "The tokens of its prompts", CompletionRequest, list[RenderedPrompt]),
    Endpoint("post", "/v1/responses/render", "The tokens of its prompt", ResponseRequest, RenderedPrompt),
    Endpoint("post", "/v1/messages/render", "The tokens of its prompt", MessagesRequest, RenderedPrompt),
    Endpoint("post", "/v1/completions", "Continue prompts", CompletionRequest, Completion, Completion),
    Endpoint("post", "/invocations", "A chat or a completion", ChatRequest, ChatCompletion, ChatChunk),
    Endpoint("post", "/v1/score", "Log-probabilities of sampled tokens", ScoreBody, Scores),
    Endpoint("post", "/generative_scoring", "Probability of a label", GenerativeScoringBody, ItemScores),
    Endpoint("post", "/v1/responses", "Answer a conversation", ResponseRequest, ModelResponse, ResponseEvent),
    Endpoint("get", "/v1/responses/{response}", "A stored response", None, ModelResponse),
    Endpoint("delete", "/v1/responses/{response}", "Delete a stored response"),
    Endpoint("post", "/v1/responses/{response}/cancel", "Stop a response in the background", None, ModelResponse),
    Endpoint(
        "post", "/v1/messages", "Anthropic's Messages", MessagesRequest, Message, MessageEvent, AnthropicErrorBody
    ),
    Endpoint(
        "post", "/v1/messages/count_tokens", "Their tokens", CountTokensRequest, TokensCounted, None, AnthropicErrorBody
    ),
    Endpoint("get", "/v1/models", "The base model and its adapters", None, ModelList),
    Endpoint("get", "/v1/models/{model}", "The base model or one adapter", None, ModelCard),
    Endpoint("post", "/v1/load_lora_adapter", "Load an adapter (admin)", LoadAdapter, text="text/plain"),
    Endpoint("put", "/v1/adapters/{name}", "Update an adapter (admin)", None, AdapterUpdated),
    Endpoint("post", "/v1/unload_lora_adapter", "Unload an adapter (admin)", UnloadAdapter, text="text/plain"),
    Endpoint("post", "/load_lora_adapter", "The same as SGLang", LoadAdapter, AdaptersChanged, problem=AdaptersChanged),
    Endpoint(
        "post", "/unload_lora_adapter", "The same as SGLang", UnloadAdapter, AdaptersChanged, problem=AdaptersChanged
    ),
    Endpoint("post", "/tokenize", "Token ids of a text or a conversation", TokenizeRequest, Tokenized),
    Endpoint("get", "/tokenizer_info", "Special tokens and chat template", None, TokenizerInfo),
    Endpoint("post", "/detokenize", "Text of token ids", DetokenizeRequest, Detokenized),
    Endpoint("post", "/pause", "Stop computing, with ?mode=abort, wait or keep (admin)", None, PauseChanged),
    Endpoint("post", "/resume", "Compute again after a pause (admin)", None, PauseChanged),
    Endpoint("get", "/is_paused", "Whether an engine is paused (admin)", None, Paused),
    Endpoint("get", "/get_world_size", "Number of processes that compute the model (admin)", None, WorldSize),
    Endpoint("get", "/server_info", "The model and the limits for adapters (admin)", None, ServerInfo),
    Endpoint("get", "/health", "Whether an engine is alive", None, Status, open=True),
    Endpoint("get", "/ready", "Whether requests are accepted", None, Status, open=True),
    Endpoint("get", "/ping", "The status of /ready without a body", open=True, text="text/plain"),
    Endpoint("post", "/ping", "The same", open=True, text="text/plain"),
    Endpoint("get", "/version", "The release", None, Version),
    Endpoint("get", "/metrics", "Counters and gauges for Prometheus", text="text/plain"),
    Endpoint("get", "/load", "Number of open requests", None, Load),
    Endpoint("get", "/console/history", "Metrics of the last day, for the console", None, HistoryReport),
    Endpoint("get", "/docs", "This document as a page", open=True, text="text/html"),
    Endpoint("get", "/openapi.json", "This document", open=True),
    Endpoint("get", "/", "The console: a page for people", open=True, text="text/html"),
)


def openapi_document(version: str, root_path: str = "") -> dict[str, Any]:
    """Return the document for a release. `root_path`: see `GatewaySettings`."""
    types = {
        kind
        for each in ENDPOINTS
        for kind in (each.request_body, each.response, each.event, each.problem)
        if kind is not None
    }
    ordered = sorted(types, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    refs = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in ENDPOINTS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sidestream", "version": version, "description": "LoRA fine-tunes of one base model."},
        "servers": [{"url": root_path or "/"}],
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
    problem = {"application/json": {"schema": refs[each.problem]}}
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
    for name in re.findall("{([a-z]+)}", each.path):
        schema = {"type": "string", "minLength": 1, "maxLength": 256}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if each.response is AdapterUpdated:
        limits = {"type": "integer", "minimum": 1}, {"type": "string", "enum": list(INFLIGHT)}
        operation["parameters"] += [
            {"name": name, "in": "query", "schema": limit}
            for name, limit in zip(("version", "inflight"), limits, strict=True)
        ]
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    return operation


async def document(context: GatewayContext, request: Request) -> Response:
    """Return the OpenAPI document."""
    return Response(_document(context.settings.root_path), media_type="application/json")


async def page(request: Request) -> Response:
    """Return the OpenAPI document as HTML."""
    return Response(_page(), media_type="text/html", headers=_HEADERS)


async def console(request: Request) -> Response:
    """Return the console."""
    page, headers = console_page()
    return Response(page, media_type="text/html", headers=headers)


@functools.cache
def _document(root_path: str) -> bytes:
    return msgspec.json.encode(openapi_document(__version__, root_path))


@functools.cache
def _page() -> str:
    components = openapi_document(__version__)["components"]["schemas"]
    fields = {
        name: [(field, _kind(schema)) for field, schema in component.get("properties", {}).items()]
        for name, component in components.items()
    }
    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE)
    return template.render(version=__version__, endpoints=ENDPOINTS, fields=fields)


def _kind(schema: dict[str, object]) -> str:
    """Describe a schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    options = schema.get("anyOf")
    kind = " or ".join(map(_kind, options)) if isinstance(options, list) else str(schema.get("type", "any"))
    if "items" in schema and isinstance(schema["items"], dict):
        kind = f"list of {_kind(schema['items'])}"
    if "enum" in schema:
        kind = " or ".join(map(str, schema["enum"]))  # type: ignore[call-overload]
    bounds = [
        f"{word} {schema[name]}"
        for name, word in (
            ("minimum", ">="),
            ("maximum", "<="),
            ("exclusiveMinimum", ">"),
            ("exclusiveMaximum", "<"),
            ("maxLength", "length <="),
            ("maxItems", "at most"),
        )
        if name in schema
    ]
    return " ".join([kind, *bounds, *([f"({schema['description']})"] if "description" in schema else [])])


def routes(context: GatewayContext) -> list[Route]:
    """Return the routes of the pages."""
    return [
        Route("/", console, methods=["GET"]),
        Route("/openapi.json", functools.partial(document, context), methods=["GET"]),
        Route("/docs", page, methods=["GET"]),
    ]
