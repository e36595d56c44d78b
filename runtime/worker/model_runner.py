"""Execute step plans: choose the bucket's program, fill its static inputs, replay it, sample, return tokens."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ...ops.collectives.tensor_parallel_group import group_named, tensor_parallel_group
from ..adapters.slot_loader import LoadReport, SlotLoader
from ..scheduler.step_plan import PageCopies, StepDrafts, StepMasks, StepPlan, StepResult
from .buckets import Buckets
from .decode_rows import as_decode_rows
from .programs.bound_programs import BoundPrograms, measure_programs
from .programs.program_processes import ProgramProcesses
from .progress import progress, stage
from .sampler import Sampler, edits_logits, needs_logprobs
from .sharded_sampler import ShardedSampler
from .speculation.spec_decode_graphs import SpecDecodeGraphs, extra_inputs
from .speculation.token_history import TokenHistory
from .speculation.trained_draft import BoundFirstPass
from .staging import Staging
from .step_handle import StepHandle
from .step_inputs import StepInputs
from .transfer.page_copier import PageCopier
from .transfer.page_reader import PageReader

ROUTE = "sidestream.moe_route"
CAPTURE_TOKENS = 2048  # a larger mixed step runs longer on the GPU than its launch takes


@dataclass
class _BucketProgram:
    """A bucket's bound program. With speculation `spec_decode`, with a trained draft also `first_pass`."""

    inputs: StepInputs
    bound: BoundProgram
    logits: torch.Tensor
    spec_decode: SpecDecodeGraphs | None = None
    first_pass: BoundFirstPass | None = None
    uses: int = 0

    @property
    def all_bound(self) -> list[BoundProgram]:
        """The target's program and the draft's first pass."""
        return [self.bound, *([] if self.first_pass is None else [self.first_pass.bound])]


class ModelRunner:
    """Owns the device's state: weights, adapter stacks, KV caches, one program per bucket.

    Implements `Runner`: executes plans in order on one stream. On a GPU without `enforce_eager`, programs are replayed
    as CUDA graphs: those of decode buckets and of mixed buckets of up to CAPTURE_TOKENS. `warm_up` captures most of
    them; mixed buckets of more sequences are captured at their second use. On a CPU programs run the ops' references.

    tensors      all weights, adapter stacks and KV caches by name
    decode_rows  run steps with few prompt tokens as decode steps (`decode_rows.py`): on a GPU unless `exact`, in which
                 tokens of prompts and of answers have other bits
    """

    def __init__(
        self,
        compiled: CompiledModel,
        tensors: Mapping[str, torch.Tensor],
        buckets: Buckets,
        device: torch.device,
        *,
        slot_loader: SlotLoader | None = None,
        vocabulary: int,
        enforce_eager: bool = False,
        fail_on_compilation: bool = False,
        arena_bytes: int = 0,
        token_history: TokenHistory | None = None,
        page_copier: PageCopier | PageReader | None = None,
        processed_logprobs: bool = False,
    ) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.compiled = compiled
        self.buckets = buckets
        self.device = device
        self.slot_loader = slot_loader
        self.token_history = token_history
        self.page_copier = page_copier
        self.trained_draft = None if token_history is None else token_history.trained
        self.captures = device.type == "cuda" and not enforce_eager
        self.decode_rows = self.captures and not compiled.options.exact
        self._logits_rows = Staging([("rows", (buckets.max_num_seqs,), torch.int64)], device)
        self._tensors = dict(tensors)
        self._arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        self._vocabulary = vocabulary
        self._tp_size = compiled.options.tensor_parallel
        self._logits: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self.programs: BoundPrograms[_BucketProgram] = BoundPrograms()
        self._sampler: Sampler | ShardedSampler = Sampler(
            buckets.sampled_rows, device, processed_logprobs, compiled.options.exact
        )
        if self._tp_size > 1:
            group = group_named(tensor_parallel_group(self._tp_size))
            self._sampler = ShardedSampler(self._sampler, group, vocabulary)
        self._last_tokens = torch.zeros(buckets.max_num_seqs, dtype=torch.int32, device=device)
        self._graph_pool: Any = None
        self._awaiting_masks: StepHandle | None = None
        self._compilations = Compilations(fail=fail_on_compilation)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All weights, adapter stacks and KV caches by name, for other programs."""
        return self._tensors

    def warm_up(self, show_progress: bool = False, processes: ProgramProcesses | None = None) -> float:
        """GPU only: compile every kernel that a step can launch, and capture the programs of decode buckets and of
        prompts.

        `processes` build programs and compile the kernels, first of captured programs, which are captured while the
        others compile. Returns the time in seconds.

        The mixed buckets of few sequences launch all kernels of those with more; a test checks this.
        """
        begin = time.perf_counter()
        if self.device.type == "cuda":
            processes = processes or ProgramProcesses((), self.compiled.keep, 0)
            mixed, decode = self.buckets.warm_up_buckets(), self.buckets.captured_buckets()
            compiling = stage("compiling kernels, a minute or more at the first start", show_progress)
            order = [*decode, *reversed(mixed)] if processes.num_queues else [*mixed, *decode]
            with compiling, KernelsAhead(self.device) as ahead:
                for bucket in progress(order, "making programs", "program", show_progress):
                    processes.wait(bucket)
                    self._program(bucket)
                    if not processes.num_queues:
                        self._compile_ahead(ahead, [bucket])
                ahead.call(partial(self._sampler.warm_up, self._program(mixed[0]).logits))
                if self.token_history is not None:
                    ahead.call(self.token_history.warm_up)
                for bound in self.trained_draft.bound_chains() if self.trained_draft is not None else ():
                    ahead.add(bound)
                if not processes.num_queues:
                    self._keep_later(processes, show_progress)
                else:
                    processes.wait_for_kernels(1)
                    self._compile_ahead(ahead, decode)  # reads them from Triton's cache
            self._capture_all(decode if processes.num_queues else [*mixed, *decode], show_progress)
            if processes.num_queues:
                with stage("compiling kernels of prompts", show_progress), KernelsAhead(self.device) as ahead:
                    processes.wait_for_kernels(processes.num_queues)
                    self._compile_ahead(ahead, mixed)
                self._capture_all(mixed, show_progress)
                self._keep_later(processes, show_progress)
        if self.slot_loader is not None:
            self.slot_loader.store.steps_running = True
        return time.perf_counter() - begin

    def _compile_ahead(self, ahead: KernelsAhead, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for bound in self._program(bucket).all_bound:
                ahead.add(bound)

    def _capture_all(self, buckets: Sequence[Bucket], show_progress: bool) -> None:
        """Capture programs as CUDA graphs; run the kernels of those that are not captured."""
        for bucket in progress(buckets, "capturing CUDA graphs", "graph", show_progress):
            program = self._program(bucket)
            if self._is_captured(bucket):
                self._capture(program)
            else:
                for bound in program.all_bound:
                    bound.prepare()

    def _is_captured(self, bucket: Bucket) -> bool:
        return self.captures and (bucket.decode or bucket.verifies or bucket.tokens <= CAPTURE_TOKENS)

    def _keep_later(self, processes: ProgramProcesses, show_progress: bool) -> None:
        """Save the programs of later buckets: after a start from the cache a step would have to trace the model."""
        later = self.buckets.later_buckets()
        for bucket in later:
            processes.wait(bucket)
        rest = self.compiled.missing_programs(later)
        for bucket in progress(rest, "making programs of more sequences", "program", show_progress):
            self.compiled.keep(bucket)

    def measure_step_times(self) -> tuple[tuple[int, int, float], ...]:
        """Return (sequences, rows per sequence, seconds) of every captured decode and verify program, with LoRA if
        enabled; empty without captures. Call it after `warm_up` and before the first step, on all ranks together.

        The steps are padding only: they store nothing and read no context. Those of a model with experts have random
        tokens, since padding reads no expert; they write to the last page.
        """
        return measure_programs(self._timed_programs() if self.captures else (), self.device)

    def _timed_programs(self) -> Iterator[tuple[Bucket, Callable[[], None]]]:
        """Yield each bucket and the function that runs its program; its inputs are valid until the next one."""
        for bucket in self.buckets.captured_buckets():
            if bucket.lora != self.buckets.lora or bucket.parts or bucket.cascade:
                continue
            program = self._program(bucket)
            routes = any(step.op == ROUTE for step in program.bound.program.steps)
            if routes:
                program.inputs.fill_random(self._vocabulary)
            yield bucket, partial(self._replay_all, program)
            if routes:
                program.inputs.clear()

    def _replay_all(self, program: _BucketProgram) -> None:
        """Replay a program with its drafts."""
        for bound in program.all_bound:
            bound.replay()
        if program.spec_decode is not None:
            program.spec_decode.replay()

    def build_in_background(self) -> None:
        """CPU only: build missing programs on a thread. Until then their steps are padded and run in larger programs.

        Only a step with more logit rows than max_num_seqs may have no larger program, and waits. On a GPU `warm_up` has
        compiled every kernel. Tensor-parallel ranks must run a step in the same program, so they build it first.
        """
        if self.device.type == "cpu" and self._tp_size == 1:
            self.programs.build_in_background(self.buckets.largest_of_each_kind(), self._make_program)

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step; on a GPU return after the launch. A step with `masked_rows` is sampled later, by `constrain`.

        Raises CompiledInStep if a kernel was compiled and `fail_on_compilation` is set.
        """
        before = self._compilations.count
        with self._compilations.watch():
            handle = self._submit(plan)
        handle.compiled = self._compilations.count - before
        return handle

    def _submit(self, plan: StepPlan) -> StepHandle:
        if self._awaiting_masks is not None:
            raise RuntimeError(f"step {plan.step} was submitted while step {self._awaiting_masks.step} waits for masks")
        for slot, number in plan.slot_loads.tolist():
            if self.slot_loader is None:
                raise RuntimeError("a plan loads an adapter, but the engine was started without adapter slots")
            self.slot_loader.load(slot, number)
        if self.slot_loader is not None:
            if len(plan.adapter_numbers):
                self.slot_loader.check_slots(plan.adapter_index[plan.query_start[1:] - 1], plan.adapter_numbers)
            self.slot_loader.before_step(plan.adapter_index)
        if self.page_copier is not None:
            self.page_copier.before_step(plan)
        parts = self.slot_loader is not None and self.slot_loader.has_parts(plan.adapter_index)
        handle = StepHandle(plan)
        rows = as_decode_rows(plan, self.buckets.max_num_seqs) if self.decode_rows else None
        sampled = plan.logits_indices
        plan = plan if rows is None else rows
        bucket = self.buckets.pick(plan, parts)
        program = self._program(bucket)
        program.uses += 1
        if not program.bound.captured and program.uses > 1 and self._is_captured(bucket):
            self._capture(program)
        inputs, spec_decode = program.inputs.tensors, program.spec_decode
        positions: torch.Tensor | None = None
        if not plan.follows:
            program.inputs.fill(plan, self._last_tokens)
        else:
            if self.token_history is None or spec_decode is None:
                raise RuntimeError("a plan uses speculation, but the engine was started without it")
            self.token_history.start_step(plan)
            program.inputs.fill(plan, self._last_tokens, spec_decode.input_values(plan))
            spec_decode.place(plan)
            if plan.masks_drafts:
                handle.send_drafts(spec_decode.drafts, persistent=spec_decode.captured)
            positions = inputs["positions"]
            if not plan.decode and not plan.verifies:
                positions = positions.index_select(0, inputs["logits_indices"])
        program.bound.replay()
        logits = program.logits[: len(plan.logits_indices)]
        if rows is not None:
            self._logits_rows.host["rows"][: len(sampled)] = sampled
            self._logits_rows.upload(len(sampled))
            logits = logits.index_select(0, self._logits_rows.device["rows"][: len(sampled)])
        if len(plan.masked_rows):
            handle.unsampled = program, logits, positions
            self._awaiting_masks = handle
        else:
            self._sample(handle, program, logits, positions)
        return handle

    def drafts(self, handle: StepHandle) -> StepDrafts:
        """Wait for the drafts that a step's masks depend on; they are ready before its logits."""
        return handle.drafts()

    def constrain(self, handle: StepHandle, masks: StepMasks) -> None:
        """Sample a step that waits for these masks."""
        if handle.unsampled is None or handle.step != masks.step:
            raise RuntimeError(f"masks of step {masks.step} were sent, but step {handle.step} does not wait for them")
        (program, logits, positions), handle.unsampled = handle.unsampled, None
        self._awaiting_masks = None
        before = self._compilations.count
        with self._compilations.watch():
            self._sample(handle, program, logits, positions, masks)
        handle.compiled += self._compilations.count - before

    def _sample(
        self,
        handle: StepHandle,
        program: _BucketProgram,
        logits: torch.Tensor,
        positions: torch.Tensor | None,
        masks: StepMasks | None = None,
    ) -> None:
        plan, spec_decode = handle.plan, program.spec_decode
        if plan.follows and spec_decode is not None:
            tokens_only = masks is None and not edits_logits(plan.sampling) and not needs_logprobs(plan.sampling)
            if spec_decode.captured and self._tp_size == 1 and tokens_only:
                samples, verified = None, spec_decode.sample(plan)
            else:
                samples = self._sampler(logits, plan, masks, positions)
                verified = spec_decode.accept(samples.tokens, plan, masks)
            handle.send(samples, verified)
            spec_decode.copied = handle.done
            if self.trained_draft is not None and program.first_pass is not None:
                input_ids, staged = program.inputs.tensors["input_ids"], program.inputs.staged
                self.trained_draft.run_first_pass(
                    program.first_pass, plan, staged, input_ids, verified.tokens, verified.accepted
                )
            return
        samples = self._sampler(logits, plan, masks, positions)
        # -1 is no token: the embedding's kernel reads it as zeros, its reference would raise
        tokens = samples.tokens.clamp_min(0) if self.device.type == "cpu" else samples.tokens
        self._last_tokens[: plan.num_sequences].copy_(tokens)
        handle.send(samples)

    def start_load(self, slot: int, number: int) -> None:
        """Start loading an adapter into an unused slot, or with slot -1 into host memory only; return at once."""
        if self.slot_loader is None:
            raise RuntimeError("an adapter is to be loaded, but the engine was started without adapter slots")
        self.slot_loader.start_load(slot, number)

    def loaded(self, timeout: float = 0.0) -> list[LoadReport]:
        """Return (slot, number, error or None) of ended loads; wait up to `timeout` seconds for the first."""
        return [] if self.slot_loader is None else self.slot_loader.finished_loads(timeout)

    def forget_adapter(self, number: int) -> None:
        """Free an adapter that is no longer used."""
        if self.slot_loader is not None:
            self.slot_loader.drop(number)

    def copy_pages(self, copies: PageCopies) -> None:
        """Start copies between KV pages and host memory; return at once."""
        if self.page_copier is None:
            raise RuntimeError("KV pages are to be copied, but the engine was started without kv_host_gb")
        self.page_copier.start(copies)

    def copied(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        """Return (ticket, error or None) of ended copies; wait up to `timeout` seconds for the first."""
        return [] if self.page_copier is None else self.page_copier.finished(timeout)

    def in_host_memory(self) -> list[int]:
        """Return the numbers of the adapters in host memory."""
        return [] if self.slot_loader is None else self.slot_loader.store.numbers

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step's tokens."""
        result = handle.result()
        if handle.done is not None and self.slot_loader is not None:
            self.slot_loader.record_step_end(time.monotonic())
        return result

    def _program(self, bucket: Bucket) -> _BucketProgram:
        return self.programs.get(bucket, self._make_program)

    def _make_program(self, bucket: Bucket) -> _BucketProgram:
        compiled = self.compiled.program(bucket)
        try:
            program = self._bind(compiled)
        except BIND_ERRORS as error:
            program = self._bind(self.compiled.rebuilt(bucket, error))
        if self._tp_size > 1:
            check_same_order(program.bound.program, group_named(tensor_parallel_group(self._tp_size)))
        return program

    def _bind(self, program: Program) -> _BucketProgram:
        extra = () if self.token_history is None else extra_inputs(self.token_history)
        inputs = StepInputs(program, self.device, extra)
        outputs = self._outputs(program)
        if program.arena_bytes > self._arena.numel():
            self._arena = torch.empty(program.arena_bytes, dtype=torch.uint8, device=self.device)
        bound = BoundProgram(program, {**self._tensors, **inputs.tensors, **outputs}, self.device, arena=self._arena)
        spec_decode = first_pass = None
        if self.token_history is not None and program.bucket is not None:
            spec_decode = SpecDecodeGraphs(self.token_history, program.bucket, inputs, bound.outputs[0])
        if self.trained_draft is not None and program.bucket is not None:
            query_start, features = inputs.staged["query_start"], bound.outputs[1:]
            first_pass = self.trained_draft.bind_first_pass(program.bucket, inputs.tensors, query_start, features)
        return _BucketProgram(inputs, bound, bound.outputs[0], spec_decode, first_pass)

    def _outputs(self, program: Program) -> dict[str, torch.Tensor]:
        """Return the output buffers: logits, and the hidden states that a trained draft reads."""
        logits, *features = (view.buffer for view in program.outputs)
        outputs = {}
        for buffer in program.of_kind("output"):
            if self.trained_draft is not None and buffer.name in features:
                index = features.index(buffer.name)
                outputs[buffer.name] = self.trained_draft.feature_buffer(index, buffer.shape[0])
            elif buffer.name == logits:
                outputs[buffer.name] = self._logits_buffer(buffer.shape, buffer.dtype)
        return outputs

    def _capture(self, program: _BucketProgram) -> None:
        program.inputs.clear()  # the runs before the capture must store nothing
        with nullcontext() if self.slot_loader is None else self.slot_loader.device_calls:
            for bound in program.all_bound:
                bound.capture(self._graph_pool)
                self._graph_pool = bound.pool
            bucket = program.bound.program.bucket
            if program.spec_decode is not None and bucket is not None and (bucket.decode or bucket.verifies):
                self._graph_pool = program.spec_decode.capture(self._graph_pool)

    def _logits_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return rows of the logits buffer that programs share: each step's are read before the next step runs."""
        max_rows = max(self.buckets.logit_rows, self.buckets.sampled_rows)
        if len(shape) != 2 or shape[0] > max_rows:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if (dtype, shape[1]) not in self._logits:
            self._logits[dtype, shape[1]] = torch.empty(max_rows, shape[1], dtype=dtype, device=self.device)
        return self._logits[dtype, shape[1]][: shape[0]]
