"""State of one sequence. A request with n > 1 is n sequences."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..api.request import PageOffer
from ..api.sampling_params import SamplingParams
from ..text.structured.matcher import Matcher
from .logit_edits import BadWords
from .speculation import Speculation
from .step_plan import Int32

NO_POSITIONS: Int32 = np.empty(0, np.int32)


class Status(Enum):
    """State of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    LOADING = "loading"
    """Not queued: pages of its prefix are being copied from host memory or read from files (`host_pages`)."""
    HELD = "held"
    """Not queued: it may have caused a failed step (`failed_steps`)."""
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and its continuation.

    tokens         known ids of prompt and output
    limit          most tokens of prompt and output
    number         adapter number, -1 = the base model; a name that gets new content gets a new number
    active_from    first token that its adapter computes (`find_activation`); -1: none, the base model computes all
    ahead          tokens to compute before it needs its adapter's slot; 0: none, or it has had the slot
    priority       lower is served sooner
    owner          steps are shared fairly between owners
    deadline       time at which it ends unfinished, on the scheduler's clock
    in_flight      sampled tokens of plans in flight, without drafts
    drafted        drafts of issued plans
    computed       tokens with keys and values written by issued plans, without drafts
    row            its row in the scheduler's tables while it runs, else -1
    sampled_at     (step, row of the plan) of the last sampled token, where a token in flight will be found
    page_keys      content keys of its first full pages
    published      number of its pages in the prefix cache; `publish_at`: number of tokens that fill the next one
    cached_tokens  prompt tokens that the prefix cache had
    loads          loads of its prefix from host memory since it last ran; `pages_loaded`: pages of the last one
    offer          pages of its prompt that another engine has computed, until their load has started
    prefill_cached  cached tokens of that engine; None: it has loaded no such page
    prefill_only   its pages are held for another engine after its first token
    started        time when it first left the queue, in seconds since the epoch; 0: it has not
    versions       (first output token, version) of its adapter, after a switch (`engine.adapter_switch`); the prefix
                   cache gets none of its further pages
    switched_at    first step with the last of them
    resumed        number of its tokens when it last started to run
    charged        tokens that its owner's and adapter's shares were charged for
    chunked_at     last step with a chunk of its prompt
    score_positions  ascending positions of its prompt whose logits score the next token; `scored`: number of those
                   reported
    matcher        state of its grammar, or None
    allowed        the only tokens that may be sampled, or None
    edits_logits   some steps change its logits or report given ones; `needs_history`: how depends on its former tokens
    on_device      the device keeps its tokens
    speculation    None: no drafts, as always when logits are edited
    sampled        in an exact engine: (begin, end) of its sampled tokens, which prompts may contain. They are computed
                   in decode steps, also when they are computed again, and all others in prompt steps
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
    active_from: int = 0
    ahead: int = 0
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
    loads: int = 0
    pages_loaded: int = 0
    offer: PageOffer | None = None
    prefill_cached: int | None = None
    prefill_only: bool = False
    started: float = 0.0
    versions: list[tuple[int, int]] = field(default_factory=list)
    switched_at: int = -1
    resumed: int = 0
    charged: int = 0
    chunked_at: int = -1
    score_positions: Int32 = field(default_factory=lambda: NO_POSITIONS)
    scored: int = 0
    bad_words: BadWords | None = None
    matcher: Matcher | None = None
    speculation: Speculation | None = None
    drafted: int = 0
    on_device: bool = False
    sampled: tuple[tuple[int, int], ...] = ()
    allowed: Int32 | None = field(init=False)
    edits_logits: bool = field(init=False)
    needs_history: bool = field(init=False)

    def __post_init__(self) -> None:
        params, bad_words = self.params, self.bad_words
        self.allowed = None if params.allowed_ids is None else np.asarray(params.allowed_ids, np.int32)
        self.needs_history = params.needs_history or (bad_words is not None and bad_words.needs_history)
        self.edits_logits = (
            self.needs_history
            or bool(params.biases)
            or params.min_tokens > 0
            or bad_words is not None
            or self.allowed is not None
            or bool(params.reported_ids)
        )
        if self.edits_logits:
            self.speculation = None

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of its prompt are left to score."""
        return self.scored < len(self.score_positions)

    @property
    def next_scored(self) -> int:
        """The position of the next logits that score a token of its prompt."""
        return int(self.score_positions[self.scored])

    @property
    def cacheable(self) -> int:
        """Number of its first tokens that may come from cached pages: those before the next position to score."""
        if self.versions or self.params.skip_reading_prefix_cache:
            return 0
        most = self.next_scored if self.scores_prompt else len(self.tokens) - 1
        return min(most, self.sampled[0][0]) if self.sampled else most

    @property
    def given_left(self) -> int:
        """Number of tokens to compute before the next sampled one; always 0 in an engine that is not exact."""
        for begin, end in self.sampled:
            if self.computed < end:
                return max(0, begin - self.computed)
        return 0

    @property
    def computable(self) -> int:
        """Number of tokens that it may compute with the slot that it has."""
        return self.ahead or self.length

    @property
    def chunk_left(self) -> int:
        """Number of tokens of its next chunk without a limit; 0: its next token is sampled."""
        left = self.computable - self.computed
        return min(left, self.given_left) if self.sampled else left

    @property
    def has_progressed(self) -> bool:
        """Whether it has sampled a token since it last started to run, in an exact engine more than it had before.

        An exact engine computes those again one by one, so that earlier preemptions would cost more than they serve.
        """
        if self.sampled:
            return self.length - self.resumed > max(0, self.resumed - self.prompt_length)
        return self.in_flight > 0 or len(self.tokens) - self.computed <= 1

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: priority, then arrival."""
        return self.priority, self.arrival

    @property
    def length(self) -> int:
        """Number of tokens, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def max_length(self) -> int:
        """Number of tokens if every draft in flight is accepted."""
        return len(self.tokens) + self.in_flight + self.drafted

    @property
    def output_ids(self) -> list[int]:
        """Known sampled tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.status is Status.FINISHED

    def note_accepted(self, step: int, count: int) -> None:
        """Count accepted drafts of a step that may have been planned before the last switch."""
        if step < self.switched_at:
            begin, version = self.versions[-1]
            self.versions[-1] = begin + count, version

    def history(self) -> Counter[int]:
        """Return each distinct known token -> its count in the output (0 = in the prompt only)."""
        if self.counts is None:
            self.counts = Counter(dict.fromkeys(self.tokens[: self.prompt_length], 0))
            self.counts.update(self.output_ids)
        return self.counts

    def banned(self, step: int) -> set[int]:
        """Return the tokens that may not come next, after `step` output tokens."""
        banned: set[int] = set()
        if step < self.params.min_tokens:
            banned |= self.stop_ids | self.eos_ids
        if self.bad_words is not None:
            banned |= self.bad_words.banned_after(self.tokens, self.prompt_length)
        return banned


def find_activation(prompt: list[int], invocation: tuple[int, ...]) -> int:
    """Return the start of the last occurrence of aLoRA's invocation in a prompt, as PEFT does; -1 if there is none."""
    length = len(invocation)
    backwards, wanted, place = prompt[::-1], list(invocation[::-1]), -1
    while True:
        try:
            place = backwards.index(wanted[0], place + 1)
        except ValueError:
            return -1
        if backwards[place : place + length] == wanted:
            return len(prompt) - place - length
