"""Choose the bucket, and so the program, of each step."""

from dataclasses import dataclass
from itertools import pairwise

from ...compiler.program.program import Bucket
from ...ops.core.triton_support import next_power_of_2
from ..scheduler.step_plan import CASCADE_SEQUENCES, DRAFT_SIZES, VERIFIED_ROWS, StepPlan, most_logits

FINE_DECODE = 64
SMALLEST_MIXED = 64
CASCADE_STEP = 32  # between sizes of cascade buckets: few, since each takes time and memory at the start
MIXED_SEQUENCES = (8, 64)


@dataclass(frozen=True)
class Buckets:
    """The engine's buckets.

    On a GPU there are decode buckets of 1, 2, 4, 8, then every 8 up to 64 and every 16 beyond; mixed buckets of 64,
    128, 192, 256, 384, ... tokens and 8, 64 or all sequences; and verify buckets for steps with drafts: 2, 4 and 8 rows
    per sequence, up to VERIFIED_ROWS in all. With `cascade` there are further decode buckets, every 32 from
    CASCADE_SEQUENCES on, for steps whose sequences share prefixes.

    drafts   maximum drafts per sequence
    parts    the engine has stacks for adapters' parts, so that steps with adapters have two kinds of programs
    cascade  there are programs with cascade attention
    rounded  round all sizes up to powers of two; for the CPU, where a padded row takes as long as a real one
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    pages: int
    blocks: int
    lora: bool
    rounded: bool = False
    drafts: int = 0
    parts: bool = False
    cascade: bool = False

    def decode_sizes(self) -> list[int]:
        """Return batch sizes of the decode buckets, ascending; the last is max_num_seqs."""
        steps = [1, 2, 4, 8, *range(16, FINE_DECODE, 8), *range(FINE_DECODE, self.max_num_seqs, 16)]
        return [size for size in steps if size < self.max_num_seqs] + [self.max_num_seqs]

    def cascade_sizes(self) -> list[int]:
        """Return batch sizes of the cascade buckets, ascending; none without `cascade`."""
        if not self.cascade or self.max_num_seqs < CASCADE_SEQUENCES:
            return []
        return [*range(CASCADE_SEQUENCES, self.max_num_seqs, CASCADE_STEP), self.max_num_seqs]

    def mixed_sizes(self) -> list[int]:
        """Return token counts of the mixed buckets, ascending; the last is max_num_batched_tokens."""
        sizes = [SMALLEST_MIXED << power for power in range(self.max_num_batched_tokens.bit_length())]
        sizes = sorted(
            size for base in sizes for size in ((base,) if base == SMALLEST_MIXED else (base, base + base // 2))
        )
        return [size for size in sizes if size < self.max_num_batched_tokens] + [self.max_num_batched_tokens]

    def sequence_sizes(self) -> list[int]:
        """Return numbers of logit rows of the mixed buckets, ascending; the last includes scored prompt tokens."""
        sizes = [size for size in MIXED_SEQUENCES if size < self.max_num_seqs] + [self.max_num_seqs]
        return sizes + [self.logit_rows] * (self.logit_rows > self.max_num_seqs)

    def verify_sizes(self) -> list[tuple[int, int]]:
        """Return (sequences, rows per sequence) of the verify buckets."""
        return [
            (size, rows) for rows in self._verify_rows() for size in self.decode_sizes() if size * rows <= VERIFIED_ROWS
        ]

    def _verify_rows(self) -> list[int]:
        return [1 + size for size in DRAFT_SIZES if size < 2 * self.drafts]

    @property
    def sampled_rows(self) -> int:
        """Maximum number of rows that a step samples."""
        return max(self.max_num_seqs, self._largest_verify().tokens if self.drafts else 0)

    @property
    def logit_rows(self) -> int:
        """Maximum number of logit rows of a step without drafts."""
        return most_logits(self.max_num_seqs, self.max_num_batched_tokens)

    def largest(self) -> Bucket:
        """Return the bucket that needs the most memory."""
        return self._make(self.max_num_batched_tokens, self.max_num_seqs, False, *self._variants()[0])

    def largest_decode(self) -> Bucket:
        """Return the bucket for every decode step."""
        return self._make(self.max_num_seqs, self.max_num_seqs, True, *self._variants()[0])

    def _largest_verify(self) -> Bucket:
        """Return the bucket for every step with drafts."""
        sequences = min(self.max_num_seqs, VERIFIED_ROWS // 2)
        total = min(VERIFIED_ROWS, sequences * self._verify_rows()[-1])
        rows = next(rows for rows in self._verify_rows() if sequences * rows >= total)
        return self._make_verify(sequences, rows, *self._variants()[0])

    def largest_of_each_kind(self) -> list[Bucket]:
        """Return buckets for every step, except for one with more logit rows than max_num_seqs."""
        return [self.largest(), self.largest_decode(), *([self._largest_verify()] if self.drafts else [])]

    def warm_up_buckets(self) -> list[Bucket]:
        """Return mixed buckets that launch every kernel of a prompt's step: one of each token count, on which the
        layers depend, and one of each number of logit rows, on which the head depends.
        """
        few, *more = self.sequence_sizes()
        sizes = [(tokens, few) for tokens in self.mixed_sizes()]
        sizes += [(_at_least(self.mixed_sizes(), sequences), sequences) for sequences in more]
        return [self._make(*size, False, *variant) for size in sizes for variant in self._variants()]

    def later_buckets(self) -> list[Bucket]:
        """Return the other mixed buckets."""
        first = set(self.warm_up_buckets())
        buckets = [
            self._make(tokens, sequences, False, *variant)
            for fewer, sequences in pairwise(self.sequence_sizes())
            for tokens in self.mixed_sizes()
            if tokens > fewer  # a step has at most one row of logits per token
            for variant in self._variants()
        ]
        return [bucket for bucket in buckets if bucket not in first]

    def decode_buckets(self) -> list[Bucket]:
        """Return the decode buckets, largest first, and the cascade buckets."""
        sizes = [(size, False) for size in reversed(self.decode_sizes())]
        sizes += [(size, True) for size in reversed(self.cascade_sizes())]
        return [
            self._make(size, size, True, *variant, cascade=cascade)
            for size, cascade in sizes
            for variant in self._variants()
        ]

    def captured_buckets(self) -> list[Bucket]:
        """Return the buckets that are captured as CUDA graphs at the start: decode and verify buckets."""
        sizes = reversed(self.verify_sizes())
        verify = [self._make_verify(*size, *variant) for size in sizes for variant in self._variants()]
        return [*self.decode_buckets(), *verify]

    def built_at_start(self) -> list[Bucket]:
        """Return the buckets whose programs are built by the end of a start on a GPU, in that order."""
        return [*self.warm_up_buckets(), *self.captured_buckets(), *self.later_buckets()]

    def chain_bucket(self, sequences: int, lora: bool) -> Bucket:
        """Return the bucket of a trained draft's chain: one row per sequence."""
        return self._make(sequences, sequences, decode=True, lora=lora)

    def chain_buckets(self) -> list[Bucket]:
        """Return the chain buckets of every batch size with verify buckets, largest first."""
        sizes = sorted({size for size, _ in self.verify_sizes()}, reverse=True)
        return [self.chain_bucket(size, lora) for size in sizes for lora in {self.lora: None, False: None}]

    def _variants(self) -> tuple[tuple[bool, bool], ...]:
        """Return (lora, parts) of the kinds of programs, the largest first."""
        return ((True, True),) * self.parts + ((True, False),) * self.lora + ((False, False),)

    def pick(self, plan: StepPlan, parts: bool = False) -> Bucket:
        """Return the bucket for a step. `parts`: whether an adapter of the step has parts besides LoRA."""
        tokens, sequences = plan.num_tokens, len(plan.logits_indices)
        lora = self.lora and plan.uses_lora
        variant = lora, lora and parts
        if plan.verifies:
            return self._pick_verify(plan.num_sequences, 1 + int(plan.drafts.max()), variant)
        cascade = self.cascade and plan.cascade
        if self.rounded:
            tokens = min(next_power_of_2(tokens), self.max_num_batched_tokens)
            most = self.max_num_seqs if sequences <= self.max_num_seqs else self.logit_rows
            sequences = min(next_power_of_2(sequences), most)
            return (
                self._make(sequences, sequences, True, *variant, cascade=cascade)
                if plan.decode
                else self._make(max(tokens, sequences), sequences, False, *variant)
            )
        if plan.decode:
            size = _at_least(self.cascade_sizes() if cascade else self.decode_sizes(), sequences)
            return self._make(size, size, True, *variant, cascade=cascade)
        return self._make(
            _at_least(self.mixed_sizes(), tokens), _at_least(self.sequence_sizes(), sequences), False, *variant
        )

    def _pick_verify(self, sequences: int, rows: int, variant: tuple[bool, bool]) -> Bucket:
        if self.rounded:
            size = min(next_power_of_2(sequences), self.max_num_seqs)
        else:
            size = _at_least(self.decode_sizes(), sequences)
        return self._make_verify(size, _at_least(self._verify_rows(), rows), *variant)

    def _make_verify(self, sequences: int, rows: int, lora: bool, parts: bool) -> Bucket:
        return Bucket(sequences * rows, sequences, self.pages, self.blocks, False, lora, rows, parts)

    def _make(
        self, tokens: int, sequences: int, decode: bool, lora: bool, parts: bool = False, cascade: bool = False
    ) -> Bucket:
        return Bucket(tokens, sequences, self.pages, self.blocks, decode, lora, parts=parts, cascade=cascade)


def _at_least(sizes: list[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
