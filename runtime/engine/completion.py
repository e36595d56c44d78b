"""One completion as it grows: text, stop strings, log-probabilities."""

from typing import cast

from ..api.errors import RequestError
from ..api.outputs import CompletionOutput, FinishReason, Logprob
from ..scheduler.prompt_scores import Scored
from ..scheduler.sequence import Sequence
from ..scheduler.step_plan import StepResult
from ..text.detokenizer import ByteDetokenizer, Detokenizer, StopStrings, make_detokenizer
from ..text.token_bytes import as_text
from ..text.tokenizer import Tokenizer


class Completion:
    """Follows one sequence.

    `eager` turns every token into text at once (streams, stop strings, log-probabilities); else the text is made when
    it ends.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None, eager: bool) -> None:
        params = sequence.params
        self.sequence = sequence
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative: float | None = None if params.logprobs is None else 0.0
        self._tokenizer = tokenizer if params.detokenize else None
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._text_offsets: list[int] = []
        self._eager = eager or bool(params.stop_strings) or self.logprobs is not None
        self.plain = eager and self._tokenizer is not None and not params.stop and self.logprobs is None
        """Whether a token is nothing but a piece of text, as long as it does not end the sequence:

        `extend` then does for `accept` and `fresh_text`.
        """
        self._detokenizer: Detokenizer | ByteDetokenizer | None = None
        self._pending: list[int] = []
        self._shown = 0
        self._ended = False

    @property
    def shown(self) -> int:
        """Characters of the text that `fresh_text` and `extend` have given."""
        return self._shown

    def resume(self, characters: int) -> None:
        """The sequence begins with output of an earlier engine, and the caller has `characters` of its text.

        Raises RequestError if the output has fewer.
        """
        if self._tokenizer is not None:
            self._pending += self.sequence.output_ids
            self._push_pending(self._tokenizer)
        if characters > len(self.text):
            raise RequestError(
                f"continues[{self.sequence.index}].characters={characters} exceeds the {len(self.text)} characters of "
                "its tokens' text"
            )
        self._shown = characters
        self.plain = self.plain and characters == len(self.text)

    def accept(self, token: int, row: int, result: StepResult, goes_on: bool = False) -> str | None:
        """Take a token in; returns the stop string that it completes, if any.

        The sequence already holds the token and may have ended by it; `goes_on`: it holds later ones too, and has not.
        """
        self._ended = self.sequence.finished and not goes_on
        if self.logprobs is not None:
            self._note_logprobs(token, row, result)
        if self._tokenizer is None:
            return None
        sequence, params = self.sequence, self.sequence.params
        # a constrained text that is complete ends with reason "stop" too, and its last token belongs to it
        ended_by_token = self._ended and (token in sequence.eos_ids or token in sequence.stop_ids)
        if not ended_by_token or params.include_stop_str_in_output:
            self._pending.append(token)
        if not self._eager and not self._ended:
            return None
        new = self._push_pending(self._tokenizer)
        if (
            not new
            or not params.stop
            or (ended_by_token and params.include_stop_str_in_output)
            or len(sequence.output_ids) < params.min_tokens
        ):
            return None
        found = self._stops.find(self.text, len(new))
        if found is None:
            return None
        stop, end = found
        self.text = self.text[:end]
        self._ended = True
        return stop

    def extend(self, token: int) -> str:
        """The text that a token adds to a plain completion; the sequence goes on."""
        detokenizer = self._detokenizer
        if detokenizer is None or self._pending:
            self._pending.append(token)
            new = self._push_pending(cast(Tokenizer, self._tokenizer))
        else:
            new = detokenizer.push_one(token)
            self.text += new
        self._shown = len(self.text)
        return new

    def close(self) -> None:
        """The sequence ended without another token: make text of what is left."""
        self._ended = True
        if self._tokenizer is not None:
            self._push_pending(self._tokenizer)

    def _detokenizer_of(self, tokenizer: Tokenizer) -> Detokenizer | ByteDetokenizer:
        sequence = self.sequence
        if self._detokenizer is None:
            self._detokenizer = make_detokenizer(
                tokenizer, sequence.tokens[: sequence.prompt_length], sequence.params.skip_special_tokens
            )
        return self._detokenizer

    def _push_pending(self, tokenizer: Tokenizer) -> str:
        new = self._detokenizer_of(tokenizer).push(self._pending, last=self._ended)
        self._pending = []
        self.text += new
        return new

    def fresh_text(self) -> str:
        """Text that has not been shown yet and can no longer be cut off."""
        end = len(self.text) if self._ended else max(self._shown, len(self.text) - self._stops.held)
        fresh = self.text[self._shown : end]
        self._shown = end
        return fresh

    @property
    def text_offset(self) -> int:
        """Where in the text the latest token with a log-probability begins."""
        return min(self._text_offsets[-1], len(self.text)) if self._text_offsets else 0

    def output(self) -> CompletionOutput:
        """The completion so far, for the caller."""
        sequence = self.sequence
        # a stop string may have cut off what a token began
        offsets = None if self.logprobs is None else [min(each, len(self.text)) for each in self._text_offsets]
        reason: FinishReason | None = sequence.finish_reason  # type: ignore[assignment]
        return CompletionOutput(
            sequence.index,
            self.text,
            sequence.output_ids,
            self.cumulative,
            self.logprobs,
            reason,
            sequence.stop_reason,
            offsets,
        )

    def _note_logprobs(self, token: int, row: int, result: StepResult) -> None:
        if (
            self.logprobs is None
            or self.cumulative is None
            or result.logprob_tokens is None
            or result.logprobs is None
            or result.ranks is None
        ):
            return
        count = 1 + (self.sequence.params.logprobs or 0)
        tokens, values = result.logprob_tokens[row, :count].tolist(), result.logprobs[row, :count].tolist()
        at_start, offset = False, 0
        if self._tokenizer is not None:
            detokenizer = self._detokenizer_of(self._tokenizer)
            at_start, offset = detokenizer.at_start, len(self.text) + detokenizer.broken_before(token)
        self.logprobs.append(self._entry(tokens, values, int(result.ranks[row]), at_start))
        self._text_offsets.append(offset)
        self.cumulative += values[0]

    def prompt_entries(self, scored: Scored) -> list[dict[int, Logprob]]:
        """The log-probabilities of the next tokens of the prompt."""
        count = 1 + (self.sequence.params.prompt_logprobs or 0)
        places = zip(
            scored.tokens[:, :count].tolist(), scored.logprobs[:, :count].tolist(), scored.ranks.tolist(), strict=True
        )
        return [self._entry(tokens, values, rank) for tokens, values, rank in places]

    def _entry(self, tokens: list[int], values: list[float], rank: int, at_start: bool = False) -> dict[int, Logprob]:
        """One place: the token that is there, of this rank, then the likeliest ones. `at_start`: of the text."""
        entry: dict[int, Logprob] = {}
        tokenizer = self._tokenizer
        for token, value, place in zip(tokens, values, [rank, *range(1, len(tokens))], strict=True):
            if token in entry:
                continue
            if tokenizer is None:
                entry[token] = Logprob(value, place)
                continue
            piece = tokenizer.token_bytes(token)
            if at_start and tokenizer.byte_table is not None:
                piece, _ = tokenizer.byte_table.begin(piece)
            entry[token] = Logprob(value, place, as_text(piece), piece)
        return entry
