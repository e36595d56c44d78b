"""From `StructuredOutputsParams` to a `Grammar`: what is plain is compiled at once, all else after a trial."""

import json
import time
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Any

from ...api.errors import RequestError
from ...api.structured_outputs import StructuredOutputsParams
from ..tokenizer import Tokenizer
from .filling import fill_threads
from .matcher import Grammar, is_fault
from .plain import is_plain
from .trial import LIMITS, Trial, refusal
from .vocabulary import grammar_vocabulary, import_llguidance

KEPT = 64
MOST_LEXERS = 2 * KEPT
"""Of all kept constraints together: each may grow to a hundred megabytes."""
LIGHT_SECONDS = 0.1
"""A constraint that took longer is compiled once only: others may take as much memory as time."""
WHITESPACE = r"[ \n\r\t]{0,32}"
"""Between JSON's tokens: a model that prints nothing but white space would never end."""


class GrammarCompiler:
    """Compiles for one model, one constraint at a time, and keeps the last ones. Thread-safe.

    tokenizer, vocabulary, eos_ids   as for `grammar_vocabulary`
    """

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocabulary, self._eos_ids = tokenizer, vocabulary, tuple(eos_ids)
        self._lock = Lock()
        self._trial = Trial()
        self._tokens: Any = None
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()

    def prepare(self) -> None:
        """Read the model's tokens, which takes a second where there are many. Raises RequestError."""
        with self._lock:
            self._prepare()

    def _prepare(self) -> Any:
        if self._tokens is None:
            self._tokens = grammar_vocabulary(self._tokenizer, self._vocabulary, self._eos_ids)
        return self._tokens

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The constraint, compiled.

        Raises RequestError for one that cannot be, with llguidance's reason, and where the package is missing.
        """
        with self._lock:
            grammar = self._kept.get(params)
            if grammar is not None:
                lexers = sum(each.lexers for each in self._kept.values())
                if grammar.lexers < grammar.most_lexers and lexers < MOST_LEXERS:
                    grammar.add_lexer()  # it is asked for again: several threads are to fill its masks
            else:
                grammar = self._compile(params)
                self._kept[params] = grammar
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(params)
            return grammar

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        try:
            return self._compiled(params)
        except RequestError:
            raise
        except BaseException as problem:
            if not is_fault(problem):
                raise
            raise RequestError(refusal(params.kind, str(problem) or type(problem).__name__)) from None

    def _compiled(self, params: StructuredOutputsParams) -> Grammar:
        llguidance, tokens = import_llguidance(), self._prepare()
        source = self._source(params)
        limits = llguidance.LLParserLimits(**LIMITS)

        def compiled() -> Any:
            return llguidance.LLMatcher(tokens, source, log_level=0, limits=limits)

        begin = time.thread_time()
        matcher = compiled()
        light = time.thread_time() - begin < LIGHT_SECONDS
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_bitmask()  # a constraint that no text fits compiles, and fails at its first mask
        if first.is_error():
            raise RequestError(refusal(params.kind, first.get_error()))
        grammar = Grammar(compiled, matcher, tokens.vocab_size, self._vocabulary, tokens.eos_tokens, params.kind)
        if light:
            grammar.most_lexers = fill_threads()
        return grammar

    def _source(self, params: StructuredOutputsParams) -> str:
        """llguidance's form of the constraint. Raises RequestError."""
        text, kind = params.text, params.kind
        if kind in ("json", "json_object"):
            options = self._json_options(params)
            if is_plain(text) and params.whitespace_pattern is None:
                matcher = import_llguidance().LLMatcher
                return str(matcher.grammar_from_json_schema(text, defaults=options))
            return self._trial.grammar("json", text, options)
        if params.choice is not None:
            # DEL is the one character that JSON may have in a string and Lark may not
            texts = (json.dumps(choice, ensure_ascii=False).replace("\x7f", r"\u007f") for choice in params.choice)
            lark = "start: " + " | ".join(texts)
            return str(import_llguidance().LLMatcher.grammar_from_lark(lark))
        return self._trial.grammar(kind, text, {})

    @staticmethod
    def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
        if params.disable_any_whitespace:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}

    def close(self) -> None:
        """End the trial's child process."""
        self._trial.close()
