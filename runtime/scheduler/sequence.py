"""One sequence's state while the engine works on it. A request with n > 1 is n sequences."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..api.sampling_params import SamplingParams
from ..text.structured.matcher import Matcher
from .forbidden import Forbidden
from .speculation import Speculation
from .step_plan import Int32


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    """Put back because a step with it failed, and not in the queue: it may be the culprit."""
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and its continuation.

    tokens      prompt and output ids that are known
    in_flight   tokens that an issued plan samples and whose ids have not come back yet, drafts not counted
    drafted     drafts of issued plans: as many tokens more may come back
    computed    how many tokens' keys and values are written by issued plans, drafts not counted
    limit       most tokens that prompt and output may come to
    row         the sequence's row in the scheduler's tables while it runs, else -1
    number      the adapter's number, which stays the same when its name is given to another adapter; -1 = the base
                model
    priority    lower is served sooner
    owner       whose it is: steps are shared fairly between owners
    deadline    when it ends unfinished, on the scheduler's clock
    page_keys   names of its full pages' contents, as far as they were needed
    published   how many of its pages are findable, and `publish_at` the number of tokens that fill the next one
    cached_tokens  how many tokens of its prompt were found in the prefix cache
    charged     how many of its tokens its owner's and its adapter's shares were charged for
    chunked_at  the last step that computed a part of its prompt
    scores_prompt  whether the log-probabilities of its prompt are wanted, and `scored`: how many there are
    forbidden   tokens that may not come next, or None
    matcher     what its output must look like, or None
    allowed     the only tokens that may be sampled, or None
    edits_logits  whether anything about its logits is changed in some of its steps; `needs_history`: what that is
                  depends on the tokens before
    followed    whether the device keeps its tokens
    speculation  how many drafts it gets, or None: it wants none, or something about its logits is edited
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
    number: int = -1
    priority: int = 0
    owner: str = ""
    deadline: float | None = None
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
    page_keys: list[bytes] = field(default_factory=list)
    published: int = 0
    publish_at: int = 0
    cached_tokens: int = 0
    charged: int = 0
    chunked_at: int = -1
    scores_prompt: bool = False
    scored: int = 0
    forbidden: Forbidden | None = None
    matcher: Matcher | None = None
    speculation: Speculation | None = None
    drafted: int = 0
    followed: bool = False
    allowed: Int32 | None = field(init=False)
    edits_logits: bool = field(init=False)
    needs_history: bool = field(init=False)

    def __post_init__(self) -> None:
        params, forbidden = self.params, self.forbidden
        self.allowed = None if params.allowed_ids is None else np.asarray(params.allowed_ids, np.int32)
        self.needs_history = params.needs_history or (forbidden is not None and forbidden.needs_history)
        self.edits_logits = (
            self.needs_history
            or bool(params.biases)
            or params.min_tokens > 0
            or forbidden is not None
            or self.allowed is not None
        )
        if self.edits_logits:
            self.speculation = None

    @property
    def reads_cache(self) -> bool:
        """Whether what the prefix cache holds of it need not be computed."""
        unscored = self.scores_prompt and self.scored < self.prompt_length - 1
        return not unscored and not self.params.skip_reading_prefix_cache

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: by priority, then by arrival."""
        return self.priority, self.arrival

    @property
    def length(self) -> int:
        """Tokens that exist, whether their ids are known here or not."""
        return len(self.tokens) + self.in_flight

    @property
    def most_tokens(self) -> int:
        """Tokens that exist if every draft in flight is accepted."""
        return len(self.tokens) + self.in_flight + self.drafted

    @property
    def output_ids(self) -> list[int]:
        """The sampled tokens that are known."""
        return self.tokens[self.prompt_length :]

    def history(self) -> Counter[int]:
        """Each distinct known token -> how often it occurs in the output (0 = in the prompt only)."""
        if self.counts is None:
            self.counts = Counter(dict.fromkeys(self.tokens[: self.prompt_length], 0))
            self.counts.update(self.output_ids)
        return self.counts

    def banned(self, step: int) -> set[int]:
        """The tokens that may not come next, after `step` tokens of output."""
        banned: set[int] = set()
        if step < self.params.min_tokens:
            banned |= self.stop_ids | self.eos_ids
        if self.forbidden is not None:
            banned |= self.forbidden.after(self.tokens, self.prompt_length)
        return banned

    @property
    def finished(self) -> bool:
        """Whether nothing more will be computed."""
        return self.status is Status.FINISHED
