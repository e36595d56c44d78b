"""Docstrings and signatures as Markdown."""

import pytest
from sidestream.tools.dev.pages.api import DirectiveError, expanded, markdown, signature

DOC = """Reads a thing.

    thing = read("x")

name      whose it is; a | b
          and more
`size`    bytes, * included
Raises ValueError for
an odd one.
"""


def test_a_docstring_becomes_a_table_code_and_paragraphs() -> None:
    assert markdown(DOC).split("\n") == [
        "Reads a thing.",
        "",
        "```python",
        'thing = read("x")',
        "```",
        "",
        "| name | what it is |",
        "| --- | --- |",
        "| `name` | whose it is; a \\| b and more |",
        "| `size` | bytes, \\* included |",
        "",
        "Raises ValueError for an odd one.",
    ]


def test_prose_is_no_table() -> None:
    prose = "A sentence that is long enough, as every one is.  Another one follows it."
    assert markdown(prose) == prose
    assert markdown("`a|b` is <odd>, and [no] link") == "`a\\|b` is &lt;odd>, and \\[no\\] link"


def test_a_short_call_is_one_line_and_a_long_one_many() -> None:
    def short(self: object, a: int, *, b: str = "x") -> list[int]:
        return [a]

    async def long(
        first_parameter: dict[str, int], second_parameter: dict[str, int], third: tuple[int, ...] = ()
    ) -> None:
        pass

    assert signature("short", short, bound=True) == "short(a: int, *, b: str = 'x') -> list[int]"
    assert signature("long", long).startswith("async long(\n    first_parameter: dict[str, int],\n")


def test_a_default_that_no_reader_wants_is_left_out() -> None:
    def call(many: tuple[int, ...] = tuple(range(100))) -> None:
        pass

    assert signature("call", call) == "call(many: tuple[int, ...] = ...) -> None"


def test_directives() -> None:
    page = expanded("before\n::: commands\nafter ::: not one\n")
    assert page.startswith("before\n## demo\n\n```text\nusage: sidestream demo") and "\n## bench serve\n" in page
    assert page.endswith("after ::: not one\n")
    for wrong in ("sidestream.Nothing", "nothing.at.all", "LLM"):
        with pytest.raises(DirectiveError, match="there is no"):
            expanded(f"::: {wrong}\n")
