"""One sequence's state while the engine works on it. A request with n > 1 is n sequences."""
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from .sampling_params import SamplingParams


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A prompt and its continuation.

    tokens      prompt and output ids that are known
    in_flight   tokens that an issued plan samples and whose ids have not come back yet
    computed    how many tokens' keys and values are written by issued plans
    limit       most tokens that prompt and output may come to
    row         the sequence's row in the scheduler's tables while it runs, else -1
    edits_logits  whether a bias, a ban or a penalty applies to some of its steps
    sampled_at  (step, row of that step's plan) of the last sample, which is where a token in flight will be found
    """

    arrival: int
    request_id: str
    index: int
    tokens: list[int]
    prompt_length: int
    limit: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    adapter: str | None = None
    status: Status = Status.WAITING
    in_flight: int = 0
    computed: int = 0
    row: int = -1
    pages: list[int] = field(default_factory=list)
    sampled_at: tuple[int, int] = (-1, -1)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    counts: Counter[int] | None = None
    preemptions: int = 0
    edits_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.edits_logits = self.params.needs_history or bool(self.params.biases) or self.params.min_tokens > 0

    @property
    def length(self) -> int:
        """Tokens that exist, whether their ids are known here or not."""
        return len(self.tokens) + self.in_flight

    @property
    def output_ids(self) -> list[int]:
        """The sampled tokens that are known."""
        return self.tokens[self.prompt_length:]

    def history(self) -> Counter[int]:
        """Each distinct known token -> how often it occurs in the output (0 = in the prompt only)."""
        if self.counts is None:
            self.counts = Counter(dict.fromkeys(self.tokens[:self.prompt_length], 0))
            self.counts.update(self.output_ids)
        return self.counts

    def append(self, token: int) -> None:
        """A sampled token has come back."""
        self.tokens.append(token)
        self.in_flight -= 1
        if self.counts is not None:
            self.counts[token] += 1

    @property
    def finished(self) -> bool:
        """Whether nothing more will be computed."""
        return self.status is Status.FINISHED
