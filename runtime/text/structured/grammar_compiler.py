"""Compiles `StructuredOutputsParams` to a `Grammar`: plain schemas at once, all else after a trial."""

import json
import time
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Any

from ...api.errors import RequestError
from ...api.structured_outputs import StructuredOutputsParams
from ..reasoning import grammar_after_reasoning
from ..tokenizer import Tokenizer
from .mask_filling import fill_threads
from .matcher import Grammar, is_fault
from .trial import LIMITS, Trial, is_plain, refusal
from .vocabulary import grammar_vocabulary, import_llguidance

KEPT = 64
MAX_LEXERS = 2 * KEPT  # of all cached constraints: each may grow to a hundred megabytes
LIGHT_SECONDS = 0.1  # slower constraints are compiled only once: they may take as much memory as time
WHITESPACE = r"[ \n\r\t]{0,32}"  # between JSON tokens: bounded, so that a text of white space ends


class GrammarCompiler:
    """Compiles one constraint at a time for one model, and caches the last ones. Thread-safe.

    tokenizer, vocabulary, eos_ids   as for `grammar_vocabulary`
    """

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocabulary, self._eos_ids = tokenizer, vocabulary, tuple(eos_ids)
        self._lock = Lock()
        self._trial = Trial()
        self._tokens: Any = None
        self._cache: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()

    def prepare(self) -> None:
        """Build the model's vocabulary, which takes a second if it is large. Raises RequestError."""
        with self._lock:
            self._prepare()

    def _prepare(self) -> Any:
        if self._tokens is None:
            self._tokens = grammar_vocabulary(self._tokenizer, self._vocabulary, self._eos_ids)
        return self._tokens

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the compiled constraint.

        Raises RequestError with llguidance's reason if it is invalid, and if the package is missing.
        """
        with self._lock:
            grammar = self._cache.get(params)
            if grammar is not None:
                lexers = sum(each.lexers for each in self._cache.values())
                if grammar.lexers < grammar.max_lexers and lexers < MAX_LEXERS:
                    grammar.add_lexer()  # used again: let several threads fill its masks
            else:
                grammar = self._compile(params)
                self._cache[params] = grammar
                if len(self._cache) > KEPT:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(params)
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
        source = grammar_after_reasoning(self._source(params), params.reasoning, params.reasoning_tokens)
        limits = llguidance.LLParserLimits(**LIMITS)

        def compiled() -> Any:
            return llguidance.LLMatcher(tokens, source, log_level=0, limits=limits)

        begin = time.thread_time()
        matcher = compiled()
        light = time.thread_time() - begin < LIGHT_SECONDS
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_bitmask()  # an unsatisfiable constraint fails at its first mask
        if first.is_error():
            raise RequestError(refusal(params.kind, first.get_error()))
        grammar = Grammar(compiled, matcher, tokens.vocab_size, self._vocabulary, tokens.eos_tokens, params.kind)
        if light:
            grammar.max_lexers = fill_threads()
        return grammar

    def _source(self, params: StructuredOutputsParams) -> str:
        """Return llguidance's form of the constraint. Raises RequestError."""
        text, kind = params.text, params.kind
        if kind in ("json", "json_object"):
            options = self._json_options(params)
            if is_plain(text) and params.whitespace_pattern is None:
                matcher = import_llguidance().LLMatcher
                return str(matcher.grammar_from_json_schema(text, defaults=options))
            return self._trial.grammar("json", text, options)
        if params.choice is not None:
            # JSON strings may contain DEL, Lark strings may not
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
