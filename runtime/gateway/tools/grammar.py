"""What an answer with calls may look like, as a grammar in Lark's notation.

With tool_choice="auto" an answer is free text, or what `response_format` asks for, until a call begins; a call always
names a function that there is, with arguments that fit its schema.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .formats import ToolFormat

WHITESPACE = r"[ \n\r\t]{0,32}"
ANYTHING = r"/(.|\n)*/"


def tool_grammar(
    form: ToolFormat,
    functions: Sequence[tuple[str, Mapping[str, Any] | None]],
    *,
    required: bool,
    parallel: bool,
    answer: Any = None,
) -> str:
    """`functions`: names, and schemas of arguments; `required`: there must be a call; `parallel`: there may be
    several; `answer`: the schema of an answer without calls (None: any text).
    """
    lines = []
    if required or answer is not None:
        more = f" ({json.dumps(form.separator)} call)*" if parallel else ""
        lines.append(f"start: calls{'' if required else ' | answer'}")
        lines.append(f"calls: call{more}")
        if not required:
            lines.append(f"answer: {_json(answer)}")
        lines.append(f"call: {json.dumps(form.opener)} body")
    elif form.text_before:
        # free text up to a lazy match of the opener, as often as calls are allowed
        lines += [f"start: call{'*' if parallel else '?'} TEXT", f"TEXT: {ANYTHING}", "call: trigger body"]
        lines.append(f"trigger[lazy]: TEXT {json.dumps(form.opener)}")
    else:
        more = f" ({json.dumps(form.separator)} call)*" if parallel else ""
        lines += [f"start: calls | TEXT | {json.dumps('')}", f"calls: call{more}", r"TEXT: /[^{](.|\n)*/"]
        lines.append(f"call: {json.dumps(form.opener)} body")
    lines.append("body: " + " | ".join(f"f{place}" for place in range(len(functions))))
    for place, (name, schema) in enumerate(functions):
        lines.append(
            f"f{place}: {_quoted(json.dumps(name) + form.middle)} {_json(_object(schema))} {_quoted(form.closer)}"
        )
    return "\n".join(lines) + "\n"


def _object(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments are an object, whatever a schema leaves open."""
    return {"type": "object", **(schema or {"properties": {}, "additionalProperties": False})}


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
    return "%json " + json.dumps(schema)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
