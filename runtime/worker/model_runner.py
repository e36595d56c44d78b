"""Executes step plans: picks the bucket's program, fills its static inputs, replays it, samples, and hands tokens
back.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...compiler.api import BIND_ERRORS, CompiledModel
from ...compiler.program.program import Bucket, Program
from ...compiler.run.bound_program import BoundProgram
from ...compiler.run.collectives import check_same_order
from ...compiler.run.kernel_compilation import Compilations, KernelsAhead
from ...ops.collectives.group import group_named, tensor_parallel_group
from ..adapters.stacks import AdapterStacks, Report
from ..scheduler.step_plan import StepDrafts, StepMasks, StepPlan, StepResult
from .answer_history import Histories
from .buckets import Buckets
from .inputs.step_inputs import StepInputs
from .program_times import time_programs
from .programs import ReadyPrograms
from .progress import progress, stage
from .sampler import Sampler, is_plain
from .sharded_sampler import ShardedSampler
from .spec_decode_graphs import Surroundings, arrays
from .step_handle import Handle
from .trained_draft import First

CAPTURE_TOKENS = 2048  # a mixed step beyond this keeps the GPU busy longer than it takes to launch it


@dataclass
class _Ready:
    """A bucket's program, bound."""

    inputs: StepInputs
    bound: BoundProgram
    logits: torch.Tensor
    around: Surroundings | None = None  # where sequences are followed
    first: First | None = None  # a trained draft's
    uses: int = 0

    @property
    def parts(self) -> list[BoundProgram]:
        """The target's, and the draft's first pass."""
        return [self.bound, *([] if self.first is None else [self.first.bound])]


class ModelRunner:
    """Owns the device side: weights, adapter stacks, KV caches, one program per bucket. Plans are executed in order on
    one stream.

    `tensors`: every weight, adapter stack and KV buffer by name. On a GPU decode buckets are replayed as CUDA graphs
    (all captured by `warm_up`, mixed ones of moderate size at their second use) unless `enforce_eager`; on the CPU the
    programs' steps run the ops' references.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        tensors: Mapping[str, torch.Tensor],
        buckets: Buckets,
        device: torch.device,
        *,
        stacks: AdapterStacks | None = None,
        vocabulary: int,
        enforce_eager: bool = False,
        fail_on_compilation: bool = False,
        arena_bytes: int = 0,
        histories: Histories | None = None,
    ) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.compiled = compiled
        self.buckets = buckets
        self.device = device
        self.stacks = stacks
        self.histories = histories
        self.trained = None if histories is None else histories.trained
        self.captures = device.type == "cuda" and not enforce_eager
        self._tensors = dict(tensors)
        self._arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        self._vocabulary = vocabulary
        self._ranks = compiled.options.tensor_parallel
        self._logits: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self.programs: ReadyPrograms[_Ready] = ReadyPrograms()
        self._sampler = self._make_sampler(Sampler(buckets.sampled_rows, device))
        self._last_tokens = torch.zeros(buckets.max_num_seqs, dtype=torch.int32, device=device)
        self._pool: Any = None
        self._waiting: Handle | None = None  # for masks
        self._compilations = Compilations(fail=fail_on_compilation)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every weight, adapter stack and KV buffer by name, for programs other than the engine's own."""
        return self._tensors

    def warm_up(self, show_progress: bool = False) -> float:
        """GPU only: compile every kernel that a step can launch, and capture every decode bucket's program; returns the
        seconds that it took.

        The mixed buckets of few sequences launch all kernels that those of more launch, which a test holds.
        """
        begin = time.perf_counter()
        if self.device.type == "cuda":
            mixed, decode = self.buckets.warm_up_buckets(), self.buckets.captured_buckets()
            compiling = stage("compiling kernels, a minute or more at the first start", show_progress)
            with compiling, KernelsAhead(self.device) as ahead:
                for bucket in progress([*mixed, *decode], "making programs", "program", show_progress):
                    for bound in self._program(bucket).parts:
                        ahead.add(bound)
                ahead.call(partial(self._sampler.warm_up, self._program(mixed[0]).logits))
                if self.histories is not None:
                    ahead.call(self.histories.warm_up)
                for bound in self.trained.bound_chains() if self.trained is not None else ():
                    ahead.add(bound)
                # a step must not wait for these: at a start from the cache the model would have to be captured first
                rest = self.compiled.missing_programs(self.buckets.later_buckets())
                for bucket in progress(rest, "making programs of more sequences", "program", show_progress):
                    self.compiled.keep(bucket)
            for bucket in mixed if self.captures else [*mixed, *decode]:
                for bound in self._program(bucket).parts:
                    bound.prepare()
            for bucket in progress(decode if self.captures else [], "capturing CUDA graphs", "graph", show_progress):
                self._capture(self._program(bucket))
        if self.stacks is not None:
            self.stacks.store.gently = True  # steps run from now on
        return time.perf_counter() - begin

    def step_times(self) -> tuple[tuple[int, int, float], ...]:
        """(sequences, rows a sequence, seconds) of every captured program of decode steps and of steps with drafts,
        with LoRA where there is any; nothing where programs are not captured. To be called after `warm_up`, when no
        step has run.

        Their steps are padding only: nothing is stored, and no context is read. Ranks that share a model do this
        together.
        """
        buckets = self.buckets.captured_buckets() if self.captures else []
        return time_programs(
            ((bucket, self._all_of(bucket)) for bucket in buckets if bucket.lora == self.buckets.lora),
            self.device,
        )

    def _all_of(self, bucket: Bucket) -> Callable[[], None]:
        """Runs a bucket's program, and what drafts add to it."""
        ready = self._program(bucket)
        runs: list[Callable[[], object]] = [bound.replay for bound in ready.parts]
        if ready.around is not None:
            runs.append(ready.around.replay)

        def run() -> None:
            for each in runs:
                each()

        return run

    def build_aside(self) -> None:
        """CPU only: no step from now on waits until a program is built.

        Whatever has no program yet runs in a larger one, padded, until a thread has built its own; only a step that
        scores more of a prompt than there are rows for sequences may have none that holds it. On a GPU `warm_up` has
        met every kernel, and steps are replayed from the graphs that it captured. Ranks that share a model must run a
        step in the same program, and wait for it.
        """
        if self.device.type == "cpu" and self._ranks == 1:
            self.programs.build_aside(self.buckets.largest_of_each_kind(), self._make_ready)

    def submit(self, plan: StepPlan) -> Handle:
        """Start a step. On a GPU this returns as soon as everything is launched. One with `masked_rows` computes its
        logits, and is sampled by `constrain`. Raises CompiledInStep with fail_on_compilation.
        """
        before = self._compilations.count
        with self._compilations.watch():
            handle = self._submit(plan)
        handle.compiled = self._compilations.count - before
        return handle

    def _submit(self, plan: StepPlan) -> Handle:
        if self._waiting is not None:
            raise RuntimeError(f"step {plan.step} came while step {self._waiting.step} waits for masks")
        for slot, number in plan.slot_loads.tolist():
            if self.stacks is None:
                raise RuntimeError("a plan loads an adapter, but the engine was started without adapter slots")
            self.stacks.load(slot, number)
        if self.stacks is not None:
            self.stacks.before_step(plan.adapter_index)
        ready = self._program(self.buckets.pick(plan))
        ready.uses += 1
        if (
            self.captures
            and not ready.bound.captured
            and ready.uses > 1
            and ready.bound.program.bucket.tokens <= CAPTURE_TOKENS  # type: ignore[union-attr]
        ):
            self._capture(ready)
        inputs = ready.inputs.tensors
        positions: torch.Tensor | None = None
        handle = Handle(plan)
        if not plan.follows:
            ready.inputs.fill(plan, self._last_tokens)
        else:
            if self.histories is None or ready.around is None:
                raise RuntimeError("a plan follows sequences, but the engine was started without speculation")
            self.histories.begin(plan)
            ready.inputs.fill(plan, self._last_tokens, ready.around.values(plan))
            ready.around.place(plan)
            if plan.masks_drafts:
                handle.send_drafts(ready.around.drafts, lasting=ready.around.captured)
            positions = inputs["positions"]
            if not plan.decode and not plan.verifies:
                positions = positions.index_select(0, inputs["logits_indices"])
        ready.bound.replay()
        logits = ready.logits[: len(plan.logits_indices)]
        if len(plan.masked_rows):
            handle.unsampled = ready, logits, positions
            self._waiting = handle
        else:
            self._sample(handle, ready, logits, positions)
        return handle

    def drafts(self, handle: Handle) -> StepDrafts:
        """Wait for the drafts of a step whose masks need them, which are there before its logits."""
        return handle.drafts()

    def constrain(self, handle: Handle, masks: StepMasks) -> None:
        """Sample a step that waits for these masks."""
        if handle.unsampled is None or handle.step != masks.step:
            raise RuntimeError(f"masks of step {masks.step} came when step {handle.step} waits for none")
        (ready, logits, positions), handle.unsampled = handle.unsampled, None
        self._waiting = None
        before = self._compilations.count
        with self._compilations.watch():
            self._sample(handle, ready, logits, positions, masks)
        handle.compiled += self._compilations.count - before

    def _sample(
        self,
        handle: Handle,
        ready: _Ready,
        logits: torch.Tensor,
        positions: torch.Tensor | None,
        masks: StepMasks | None = None,
    ) -> None:
        plan, around = handle.plan, ready.around
        if plan.follows and around is not None:
            if around.captured and self._ranks == 1 and masks is None and is_plain(plan.sampling):
                samples, counted = None, around.sample(plan)
            else:
                samples = self._sampler(logits, plan, masks, positions)
                counted = around.take(samples.tokens, plan, masks)
            handle.send(samples, counted)
            around.sent = handle.done
            if self.trained is not None and ready.first is not None:
                input_ids, staged = ready.inputs.tensors["input_ids"], ready.inputs.staged
                self.trained.follow(ready.first, plan, staged, input_ids, counted.tokens, counted.accepted)
            return
        samples = self._sampler(logits, plan, masks, positions)
        # -1: no token; the embedding's kernel reads it as zeros, its reference would raise
        fed = samples.tokens.clamp_min(0) if self.device.type == "cpu" else samples.tokens
        self._last_tokens[: plan.num_sequences].copy_(fed)
        handle.send(samples)

    def start_load(self, slot: int, number: int) -> None:
        """Begin to bring an adapter into a slot that no submitted step reads; slot -1: only into host memory.

        Returns at once.
        """
        if self.stacks is None:
            raise RuntimeError("an adapter is to be loaded, but the engine was started without adapter slots")
        self.stacks.start(slot, number)

    def loaded(self, timeout: float = 0.0) -> list[Report]:
        """(slot, number, None or what went wrong) of loads that have ended; waits up to `timeout` seconds for the
        first.
        """
        return [] if self.stacks is None else self.stacks.finished(timeout)

    def forget_adapter(self, number: int) -> None:
        """Drop an adapter that nothing uses any more."""
        if self.stacks is not None:
            self.stacks.forget(number)

    def in_host_memory(self) -> list[int]:
        """The adapters that are ready to be copied, by number."""
        return [] if self.stacks is None else self.stacks.store.numbers

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a step's tokens."""
        result = handle.result()
        if handle.done is not None and self.stacks is not None:
            self.stacks.note_step(time.monotonic())
        return result

    def _make_sampler(self, sampler: Sampler) -> Sampler | ShardedSampler:
        if self._ranks == 1:
            return sampler
        return ShardedSampler(sampler, group_named(tensor_parallel_group(self._ranks)), self._vocabulary)

    def _program(self, bucket: Bucket) -> _Ready:
        return self.programs.get(bucket, self._make_ready)

    def _make_ready(self, bucket: Bucket) -> _Ready:
        program = self.compiled.program(bucket)
        try:
            ready = self._bind(program)
        except BIND_ERRORS as problem:
            ready = self._bind(self.compiled.rebuilt(bucket, problem))
        if self._ranks > 1:
            check_same_order(ready.bound.program, group_named(tensor_parallel_group(self._ranks)))
        return ready

    def _bind(self, program: Program) -> _Ready:
        inputs = StepInputs(program, self.device, () if self.histories is None else arrays(self.histories))
        outputs = self._outputs(program)
        if program.arena_bytes > self._arena.numel():
            self._arena = torch.empty(program.arena_bytes, dtype=torch.uint8, device=self.device)
        bound = BoundProgram(program, {**self._tensors, **inputs.tensors, **outputs}, self.device, arena=self._arena)
        around = first = None
        if self.histories is not None and program.bucket is not None:
            around = Surroundings(self.histories, program.bucket, inputs, bound.outputs[0])
        if self.trained is not None and program.bucket is not None:
            query_start = inputs.staged["query_start"]
            first = self.trained.bind_first(program.bucket, inputs.tensors, query_start, bound.outputs[1:])
        return _Ready(inputs, bound, bound.outputs[0], around, first)

    def _outputs(self, program: Program) -> dict[str, torch.Tensor]:
        """Where a program puts its logits, and the hidden states that a trained draft reads."""
        logits, *features = (view.buffer for view in program.outputs)
        found = {}
        for buffer in program.of_kind("output"):
            if self.trained is not None and buffer.name in features:
                found[buffer.name] = self.trained.feature(features.index(buffer.name), buffer.shape[0])
            elif buffer.name == logits:
                found[buffer.name] = self._logits_rows(buffer.shape, buffer.dtype)
        return found

    def _capture(self, ready: _Ready) -> None:
        ready.inputs.clear()  # what runs before the capture must store nothing
        with nullcontext() if self.stacks is None else self.stacks.device_calls:
            for bound in ready.parts:
                bound.capture(self._pool)
                self._pool = bound.pool
            bucket = ready.bound.program.bucket
            if ready.around is not None and bucket is not None and (bucket.decode or bucket.verifies):
                self._pool = ready.around.capture(self._pool)

    def _logits_rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Programs share one logits buffer: each step's are read before the next step runs."""
        most = max(self.buckets.logit_rows, self.buckets.sampled_rows)
        if len(shape) != 2 or shape[0] > most:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if (dtype, shape[1]) not in self._logits:
            self._logits[dtype, shape[1]] = torch.empty(most, shape[1], dtype=dtype, device=self.device)
        return self._logits[dtype, shape[1]][: shape[0]]
