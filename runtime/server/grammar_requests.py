"""Constraints on answers, compiled next to the batcher's loop."""

from functools import partial
from importlib.util import find_spec
from typing import Any

from ..api.structured_outputs import StructuredOutputsParams
from ..text.encoder_thread import TextThread
from ..text.structured.grammar_compiler import GrammarCompiler
from ..text.tokenizer import Tokenizer
from .gpu_link import Ready

_PREPARE = "prepare"


class GrammarDesk:
    """A thread that compiles. `fileno` is readable when outcomes can be taken."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._worker = TextThread("sidestream-grammars")
        self._compiler: GrammarCompiler | None = None

    def fileno(self) -> int:
        """For polling."""
        return self._worker.fileno()

    def ready(self, ready: Ready) -> None:
        """The model's sizes are known. Its tokens are read now, so that no request waits for that."""
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer, ready.vocabulary, ready.eos_ids)
            if self._tokenizer is not None and find_spec("llguidance") is not None:
                self._worker.put_work(_PREPARE, self._compiler.prepare, 0, None)

    def has_room(self, params: StructuredOutputsParams) -> bool:
        """Whether `put` may be called with this constraint."""
        return self._worker.has_room_for(len(params.text))

    def put(self, key: str, params: StructuredOutputsParams, owner: int) -> None:
        """Compile a constraint once the model is `ready`; its outcome will carry `key`."""
        if self._compiler is None:
            raise RuntimeError("a constraint came before the model was ready")
        self._worker.put_work(key, partial(self._compiler.compile, params), len(params.text), owner)

    def discard(self, key: str) -> None:
        """Nobody wants this outcome any more."""
        self._worker.discard(key)

    def take(self) -> list[tuple[str, Any]]:
        """(key, the Grammar or what went wrong) of those that are done."""
        return [(key, outcome) for key, outcome in self._worker.take() if key != _PREPARE]

    def close(self) -> None:
        """End the thread."""
        self._worker.close()
        if self._compiler is not None:
            self._compiler.close()
