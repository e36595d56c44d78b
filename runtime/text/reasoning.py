"""Splits generated text, as it arrives, into reasoning and content: `<think>...</think>` before the answer.

`reasoning_start` finds from the prompt how an answer begins; `ReasoningParser` splits its text and counts its tokens.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..api.structured_outputs import ReasoningStart

OPENER, CLOSER = "<think>", "</think>"
SPACE = r"[ \n\r\t]{0,32}"
NOT_REASONING = rf"~/{SPACE}<think>(.|\n)*/"
"""Terminal of Lark: a text that does not begin with reasoning."""
ANY_ANSWER = "start: TEXT\n" + rf"TEXT: /(.|\n)*/ & {NOT_REASONING}"
"""Grammar in Lark's notation of any text, for a limit on the reasoning before it."""
_NO_CLOSER = "|".join(
    CLOSER[1:end].replace("/", r"\/") + f"[^<{CLOSER[end]}]".replace("/", r"\/") for end in range(1, len(CLOSER))
)
ReasoningFormat = Literal["auto", "qwen3", "deepseek_r1", "none"]
"""Values of --reasoning-parser, with vLLM's names.

auto         as qwen3 if the chat template contains a marker, else none
qwen3        reasoning begins with <think>, in the prompt or in the answer
deepseek_r1  as qwen3, and an answer without <think> begins inside the reasoning
none         reasoning stays in the content
"""


def has_reasoning(form: ReasoningFormat, template: str) -> bool:
    """Return whether answers with a chat template may begin with reasoning."""
    return form != "none" and (form != "auto" or OPENER in template or CLOSER in template)


def reasoning_start(form: ReasoningFormat, template: str, prompt: str, continued: str = "") -> ReasoningStart:
    """Return how the answer to a rendered prompt begins.

    template    source of the chat template
    continued   text of the last message if the answer continues it
    """
    end = prompt.rstrip()
    if not has_reasoning(form, template) or end.endswith(CLOSER):
        return "none"
    if end.endswith(OPENER) or continued.rfind(OPENER) > continued.rfind(CLOSER):
        return "inside"
    if continued.strip():
        return "none"
    return "inside" if form == "deepseek_r1" else "optional"


def template_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables of a chat template for a reasoning effort; "none" switches the reasoning off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


@dataclass
class SplitText:
    """Reasoning and content in a piece of text."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Splits the text of one answer. White space around the reasoning is dropped.

    An answer has at most one reasoning, before its content. Later markers are content.

    start       how the answer begins
    closer_id   token id of the closer; None: it is several tokens, and `num_tokens` is an estimate
    """

    def __init__(self, start: ReasoningStart, closer_id: int | None = None) -> None:
        self.start, self._closer_id = start, closer_id
        self._has_begun = self._is_open = self._has_text = False
        self._is_done = start == "none"
        self._skips_space = False  # between the reasoning and the content
        self._buffer = ""
        self._counted = 0
        self._count_ended = self._is_done

    @property
    def is_done(self) -> bool:
        """Whether all text from now on is content, unchanged."""
        return self._is_done and not self._skips_space

    @property
    def num_tokens(self) -> int:
        """Tokens of the reasoning so far, with its markers."""
        return self._counted if self._has_begun else 0

    def push(self, text: str, last: bool = False, token_ids: Sequence[int] = ()) -> SplitText:
        """Add text. Returns what can be sent. `last`: the text is complete; `token_ids`: of this text."""
        split = SplitText()
        self._buffer += text
        if not self._is_open and not self._is_done:
            self._open(last)
        if self._is_open:
            split.reasoning = self._take_reasoning(last)
        if self._is_done:
            split.content, self._buffer = self._buffer, ""
            if self._skips_space:
                split.content = split.content.lstrip()
                self._skips_space = not split.content
        if not self._count_ended:
            self._count(token_ids, len(split.content) / max(1, len(text)))
        return split

    def _open(self, last: bool) -> None:
        """Decide from the first characters whether the text begins with reasoning."""
        begin = self._buffer.lstrip()
        if begin.startswith(OPENER):
            self._buffer, self._is_open = begin[len(OPENER) :], True
        elif last or not OPENER.startswith(begin):
            self._is_open = self.start == "inside"
            self._is_done = not self._is_open
        self._has_begun = self._is_open

    def _take_reasoning(self, last: bool) -> str:
        """Remove from the buffer the reasoning that can be sent, and return it."""
        text, closer, rest = self._buffer.partition(CLOSER)
        if closer:
            self._is_open, self._is_done, self._skips_space = False, True, True
        elif not last:  # keep a possible start of a closer
            held = next((n for n in range(len(CLOSER) - 1, 0, -1) if text.endswith(CLOSER[:n])), 0)
            text, rest = text[: len(text) - held], text[len(text) - held :]
        if not self._has_text:
            text = text.lstrip()
        shown = text.rstrip()
        self._has_text |= bool(shown)
        # white space is sent if more reasoning follows it
        self._buffer = rest if closer or last else text[len(shown) :] + rest
        return shown

    def _count(self, token_ids: Sequence[int], content_share: float) -> None:
        """Count tokens up to the closer, or the share of the last ones whose text is not content."""
        if self._closer_id is not None and self._closer_id in token_ids:
            self._counted += token_ids.index(self._closer_id) + 1
            self._count_ended = True
        elif self._closer_id is None and self._is_done:
            self._counted += round(len(token_ids) * (1 - content_share))
            self._count_ended = True
        else:
            self._counted += len(token_ids)
            self._count_ended = self._is_done


def grammar_after_reasoning(grammar: str, start: ReasoningStart, most: int | None = None) -> str:
    """Return a grammar of llguidance that applies `grammar` after the reasoning, and to an answer without it.

    grammar   in Lark's notation, or llguidance's JSON with a list of grammars
    most      number of tokens between the markers after which the closer is forced
    """
    if start == "none":
        return grammar
    answer = json.loads(grammar)["grammars"] if grammar.startswith('{"grammars"') else [{"lark_grammar": grammar}]
    opener = "" if start == "inside" else SPACE + re.escape(OPENER)
    closer = re.escape(CLOSER).replace("/", r"\/")
    lines = ["start: reasoning SPACE @answer" + ("" if start == "inside" else " | @answer"), f"SPACE: /{SPACE}/"]
    thoughts = []
    if most is None:
        lines.append(rf"reasoning[lazy]: /{opener}(.|\n)*{closer}/")
    else:
        # llguidance counts one token less for a subgrammar at the start of an answer
        limit = most - (start == "inside")
        lines.append(f"reasoning: {'OPENER ' if opener else ''}{'thoughts ' if limit > 0 else ''}CLOSER")
        lines += [f"CLOSER: /{closer}/", *([f"OPENER: /{opener}/"] if opener else [])]
        if limit > 0:
            lines.append(f"thoughts[max_tokens={limit}]: @thoughts")
            # terminals that end before a closer, so that the model may write one
            text = f"start: (PLAIN | ANGLE)*\nPLAIN: /[^<]+/\nANGLE: /<({_NO_CLOSER})/"
            thoughts.append({"lark_grammar": text, "name": "thoughts"})
    first = {"lark_grammar": "\n".join(lines)}
    return json.dumps({"grammars": [first, answer[0] | {"name": "answer"}, *answer[1:], *thoughts]})
