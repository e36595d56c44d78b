"""Renders chat templates, as a script of its own: `chat_template` runs it in a child process, because Jinja's sandbox
bounds neither time nor memory.

One JSON object a line: {} when it is ready, then {"template", "variables", "limit"} in, {"text"} or {"error"} out.
Needs nothing but jinja2.
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 << 20


class Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which some templates put around answers for training: the text in
    it, unchanged.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        """The nodes inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for: transformers' settings, filters and functions."""

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(str(message))

    def tojson(
        value: Any,
        indent: int | None = None,
        ensure_ascii: bool = False,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form))
    return made


def render(source: str, variables: dict[str, Any], limit: int) -> str:
    """The rendered text. Raises ValueError when it has more than `limit` characters, and what the template raises."""
    parts, length = [], 0
    for part in environment().from_string(source).generate(**variables):
        length += len(part)
        if length > limit:
            raise ValueError(f"the rendered chat has more than {limit} characters")
        parts.append(part)
    return "".join(parts)


def main() -> None:
    """Answers until its input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"text": render(asked["template"], asked["variables"], asked["limit"])}
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
        except Exception as problem:  # a template may raise anything; the child goes on
            answer = {"error": f"{type(problem).__name__}: {problem}"[:500]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
