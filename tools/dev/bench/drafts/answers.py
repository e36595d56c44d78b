"""Answers of one engine at a constant number of requests, counts of its drafts, and differences to other answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn

from .....runtime.api.outputs import RequestOutput
from .....runtime.api.sampling_params import DEFAULT_MAX_LOGPROBS, SamplingParams
from .....runtime.text.prompts import make_requests


@dataclass
class Counts:
    """Answers of one adapter and task.

    tokens, drafted, accepted  of all answers; history_*: of drafts from former answers, trained_*: of a trained draft
    seconds                    wall-clock time of all answers
    different                  answers with other tokens than without speculation
    gaps                       of each of these: the difference of both tokens' log-probabilities where they differ;
                               None if one is not among the 20 likeliest
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    history_drafted: int = 0
    history_accepted: int = 0
    trained_drafted: int = 0
    trained_accepted: int = 0
    different: int = 0
    gaps: list[float | None] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Return tokens per step of a request; an accepted draft saves one step."""
        return self.tokens / max(self.tokens - self.accepted, 1)

    def add(self, other: "Counts") -> None:
        """Add the counts of another task."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def answer(
    llm: Any, prompts: Sequence[Any], adapters: Sequence[str | None], params: SamplingParams, concurrency: int
) -> tuple[list[RequestOutput], float]:
    """Return answers in the prompts' order with `concurrency` requests at a time, and the seconds of all."""
    requests = make_requests(
        list(prompts),
        params,
        list(adapters),
        tokenizer=llm.tokenizer,
        vocabulary=llm.config.vocab_size,
        max_model_len=llm.max_model_len,
        adapters=llm.registry.numbers,
        first=0,
        compile_grammar=_no_grammar,
    )
    waiting, found = iter(requests), dict[str, RequestOutput]()
    begin = time.perf_counter()
    for request in islice(waiting, concurrency):
        llm.engine.add(request)
    while llm.engine.has_work:
        _, finished = llm.engine.step()
        for output in finished:
            found[output.request_id] = output
        for request in islice(waiting, len(finished)):
            llm.engine.add(request)
    seconds = time.perf_counter() - begin
    return [found[request.request_id] for request in requests], seconds


def counts(outputs: Sequence[RequestOutput], seconds: float) -> Counts:
    """Return the counts of the answers."""
    return Counts(
        len(outputs),
        sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds,
        sum(output.num_draft_tokens for output in outputs),
        sum(output.num_accepted_tokens for output in outputs),
        sum(output.num_history_draft_tokens for output in outputs),
        sum(output.num_history_accepted_tokens for output in outputs),
        sum(output.num_trained_draft_tokens for output in outputs),
        sum(output.num_trained_accepted_tokens for output in outputs),
    )


def gaps(llm: Any, outputs: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> list[float | None]:
    """Return, for each differing pair, the difference of log-probabilities where they part, in a step of its own."""
    pairs = [
        (one, [each.outputs[0].token_ids for each in (one, other)], place)
        for one, other in zip(outputs, others, strict=True)
        for place in [first_difference(one.outputs[0].token_ids, other.outputs[0].token_ids)]
        if place is not None
    ]
    if not pairs:
        return []
    prefixes = [{"prompt_token_ids": [*one.prompt_token_ids, *both[0][:place]]} for one, both, place in pairs]
    speculation = None if llm.options.speculation == "off" else "off"
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=DEFAULT_MAX_LOGPROBS, speculation=speculation)
    seen = llm.generate(prefixes, params, adapter=[one.adapter for one, _, _ in pairs], use_tqdm=False)
    found: list[float | None] = []
    for (_, both, place), scored in zip(pairs, seen, strict=True):
        likeliest = scored.outputs[0].logprobs[0]
        two = [likeliest.get(tokens[place]) for tokens in both if place < len(tokens)]
        known = [each.logprob for each in two if each is not None]
        found.append(abs(known[0] - known[1]) if len(known) == 2 else None)
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two answers differ, or None; a prefix differs at its end."""
    if list(one) == list(other):
        return None
    same = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(same, min(len(one), len(other)))


def _no_grammar(_: Any) -> NoReturn:
    raise ValueError("these questions ask for no structured outputs")
