"""Pages: /openapi.json, /docs (the same as a self-contained page), and / (the console)."""

from functools import cache

import jinja2
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .... import __version__
from ..console.page import console_page
from .context import GatewayContext
from .openapi import ENDPOINTS, openapi_document

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
<p>Compatible with OpenAI and vLLM; <a href="openapi.json">openapi.json</a> is the same for programs.</p>
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


async def document(request: Request) -> Response:
    """Return the OpenAPI document."""
    return Response(_document(), media_type="application/json")


async def page(request: Request) -> Response:
    """Return the OpenAPI document as HTML."""
    return Response(_page(), media_type="text/html", headers=_HEADERS)


async def console(request: Request) -> Response:
    """Return the console."""
    page, headers = console_page()
    return Response(page, media_type="text/html", headers=headers)


@cache
def _document() -> bytes:
    return msgspec.json.encode(openapi_document(__version__))


@cache
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
        Route("/openapi.json", document, methods=["GET"]),
        Route("/docs", page, methods=["GET"]),
    ]
