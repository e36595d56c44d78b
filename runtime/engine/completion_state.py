"""State of one growing completion: its text, stop strings and log-probabilities."""

from typing import cast

from ..api.errors import RequestError
from ..api.outputs import CompletionOutput, FinishReason, Logprob
from ..scheduler.prompt_logprobs import ScoredTokens
from ..scheduler.sequence import Sequence
from ..scheduler.step_plan import StepResult
from ..text.detokenizer import ByteDetokenizer, Detokenizer, StopStrings, make_detokenizer
from ..text.tokenizer import Tokenizer
from .logprobs import OutputLogprobs, prompt_entries


class CompletionState:
    """Text and log-probabilities of one sequence.

    eager  decode each token when it arrives, as stop strings and log-probabilities require; else decode at the end
    plain  a token that does not end the sequence only adds text: `extend` replaces `accept` and `new_text`
    shown  number of characters returned by `new_text` and `extend`
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None, eager: bool) -> None:
        params = sequence.params
        self.sequence = sequence
        self.text = ""
        self.logprobs = None if params.logprobs is None else OutputLogprobs(params.logprobs, not params.reported_ids)
        self._tokenizer = tokenizer if params.detokenize else None
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._eager = eager or bool(params.stop_strings) or self.logprobs is not None
        self.plain = eager and self._tokenizer is not None and not params.stop and self.logprobs is None
        self.shown = 0
        self._detokenizer: Detokenizer | ByteDetokenizer | None = None
        self._pending: list[int] = []
        self._ended = self._resumed = False

    def resume(self, characters: int) -> None:
        """Continue the output of an earlier engine after the first `characters` characters of its text.

        Raises RequestError if the text is shorter.
        """
        self._resumed = True
        if self._tokenizer is not None:
            self._pending += self.sequence.output_ids
            self._decode_pending(self._tokenizer)
        if characters > len(self.text):
            raise RequestError(
                f"continues[{self.sequence.index}].characters={characters} exceeds the {len(self.text)} characters of "
                "its tokens' text"
            )
        self.shown = characters
        self.plain = self.plain and characters == len(self.text)

    def accept(self, token: int, row: int, result: StepResult, more_follow: bool = False) -> str | None:
        """Add a token; return the stop string that it completes, if any.

        The sequence already holds the token and may have ended with it. `more_follow`: the sequence holds later tokens.
        """
        self._ended = self.sequence.finished and not more_follow
        tokenizer = self._tokenizer
        if self.logprobs is not None:
            detokenizer = None if tokenizer is None else self._get_detokenizer(tokenizer)
            self.logprobs.add(token, row, result, tokenizer, detokenizer, len(self.text))
        if tokenizer is None:
            return None
        sequence, params = self.sequence, self.sequence.params
        # a constrained text that is complete also ends with reason "stop", but its last token belongs to the text
        ended_by_token = self._ended and (token in sequence.eos_ids or token in sequence.stop_ids)
        if not ended_by_token or params.include_stop_str_in_output:
            self._pending.append(token)
        if not self._eager and not self._ended:
            return None
        new = self._decode_pending(tokenizer)
        if (
            not new
            or not params.stop
            or (ended_by_token and params.include_stop_str_in_output)
            or len(sequence.output_ids) < params.min_tokens
        ):
            return None
        match = self._stops.find(self.text, len(new))
        if match is None:
            return None
        stop, end = match
        self.text = self.text[:end]
        self._ended = True
        return stop

    def extend(self, token: int) -> str:
        """Add a token to a plain completion that does not end; return its text."""
        detokenizer = self._detokenizer
        if detokenizer is None or self._pending:
            self._pending.append(token)
            new = self._decode_pending(cast(Tokenizer, self._tokenizer))
        else:
            new = detokenizer.push_one(token)
            self.text += new
        self.shown = len(self.text)
        return new

    def close(self) -> None:
        """Decode pending tokens of a sequence that ended without another token."""
        self._ended = True
        if self._tokenizer is not None:
            self._decode_pending(self._tokenizer)

    def _get_detokenizer(self, tokenizer: Tokenizer) -> Detokenizer | ByteDetokenizer:
        sequence = self.sequence
        if self._detokenizer is None:
            self._detokenizer = make_detokenizer(
                tokenizer, sequence.tokens[: sequence.prompt_length], sequence.params.skip_special_tokens
            )
        return self._detokenizer

    def _decode_pending(self, tokenizer: Tokenizer) -> str:
        new = self._get_detokenizer(tokenizer).push(self._pending, last=self._ended)
        self._pending = []
        self.text += new
        return new

    def new_text(self) -> str:
        """Return new text that no stop string can cut off any more."""
        end = len(self.text) if self._ended else max(self.shown, len(self.text) - self._stops.held)
        fresh = self.text[self.shown : end]
        self.shown = end
        return fresh

    def _text_offsets(self) -> list[int]:
        # a stop string may cut off the beginning of a token
        return [] if self.logprobs is None else [min(each, len(self.text)) for each in self.logprobs.offsets]

    def last_logprobs(self) -> tuple[dict[int, Logprob] | None, int]:
        """Return the latest token's log-probabilities, if any, and its character offset in the text."""
        if self.logprobs is None or not self.logprobs.entries:
            return None, 0
        return self.logprobs.entries[-1], min(self.logprobs.offsets[-1], len(self.text))

    def prompt_entries(self, scored: ScoredTokens) -> list[dict[int, Logprob]]:
        """Return the log-probabilities of the next prompt tokens."""
        return prompt_entries(scored, self._tokenizer)

    def output(self) -> CompletionOutput:
        """Return the completion so far."""
        sequence, logprobs = self.sequence, self.logprobs
        reason: FinishReason | None = sequence.finish_reason  # type: ignore[assignment]
        return CompletionOutput(
            sequence.index,
            self.text,
            sequence.output_ids,
            None if logprobs is None else logprobs.cumulative,
            None if logprobs is None else logprobs.entries,
            reason,
            sequence.stop_reason,
            None if logprobs is None else self._text_offsets(),
            None if self._resumed and sequence.params.seed is None else sequence.seed,
            list(sequence.versions),
        )
