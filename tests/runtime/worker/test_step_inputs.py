"""A step of any size fills its bucket: padding stores nothing, reads nothing and belongs to no adapter."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sidestream.compiler.program.program import Bucket, Buffer, Program
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.engine.engine import Engine
from sidestream.runtime.scheduler.scheduler import Scheduler, SchedulerLimits
from sidestream.runtime.scheduler.step_plan import SCORED_ROWS, drafts_within
from sidestream.runtime.worker.buckets import Buckets
from sidestream.runtime.worker.step_inputs import NAMES, StepInputs
from support.fake_runner import FakeRunner

CPU = torch.device("cpu")


def make_program(bucket):
    shapes = {"block_table": (bucket.sequences, bucket.blocks), "query_start": (bucket.sequences + 1,)}
    lengths = {name: bucket.tokens for name in NAMES[:4]} | {name: bucket.sequences for name in NAMES[4:]}
    buffers = [
        Buffer(name, "input", shapes.get(name, (lengths[name],)), torch.int64 if name in NAMES[:2] else torch.int32)
        for name in NAMES
    ]
    return Program(bucket, tuple(buffers), (), 0, ())


def engine_of(overlap):
    return Engine(
        Scheduler(SchedulerLimits(40, 640, 6, 64, 2), {"a": 0, "b": 1}), FakeRunner(40, 2), None, (), overlap=overlap
    )


def test_padding():
    engine = engine_of(True)
    for index, (length, adapter) in enumerate(((5, None), (100, "a"), (33, "b"), (1, None), (70, "a"))):
        engine.add(
            Request(str(index), None, list(range(length)), SamplingParams(temperature=0, max_tokens=20), adapter)
        )
    last = torch.zeros(6, dtype=torch.int32)
    buckets = Buckets(6, 64, 40, 10, True)
    inputs = {}
    while engine.has_work:
        done = len(engine.runner.plans)
        engine.step()
        for plan in engine.runner.plans[done:]:
            bucket = buckets.pick(plan)
            if bucket not in inputs:
                inputs[bucket] = StepInputs(make_program(bucket), CPU)
            inputs[bucket].fill(plan, last)
            assert_filled(inputs[bucket].tensors, plan, bucket, last)
            last = torch.from_numpy(np.resize(engine.runner._last, 6).astype(np.int32))
    assert {bucket.decode for bucket in inputs} == {True, False} and {bucket.lora for bucket in inputs} == {True}


def assert_filled(tensors, plan, bucket, last):
    tokens, sequences = plan.num_tokens, plan.num_sequences
    assert bucket.tokens >= tokens and bucket.sequences >= sequences and bucket.decode == plan.decode
    expected = plan.input_ids.copy()
    expected[plan.feed_positions] = last.numpy()[plan.feed_rows]
    assert tensors["input_ids"][:tokens].tolist() == expected.tolist()
    for name in ("positions", "slot_mapping", "adapter_index"):
        assert tensors[name][:tokens].tolist() == getattr(plan, name).tolist()
    assert (
        (tensors["slot_mapping"][tokens:] == -1).all()
        and (tensors["adapter_index"][tokens:] == -1).all()
        and (tensors["positions"][tokens:] == 0).all()
    )
    assert (
        tensors["context_lens"][:sequences].tolist() == plan.context_lens.tolist()
        and (tensors["context_lens"][sequences:] == 0).all()
    )
    assert (
        tensors["query_start"][: sequences + 1].tolist() == plan.query_start.tolist()
        and (tensors["query_start"][sequences:] == tokens).all()
    )
    assert (
        tensors["logits_indices"][:sequences].tolist() == plan.logits_indices.tolist()
        and (tensors["logits_indices"][sequences:] == 0).all()
    )
    width = plan.block_table.shape[1]
    assert torch.equal(tensors["block_table"][:sequences, :width], torch.from_numpy(plan.block_table))
    assert (tensors["block_table"] >= 0).all() and (tensors["block_table"] < 40).all()


def test_a_cleared_step_stores_nothing():
    inputs = StepInputs(make_program(Bucket(8, 8, 4, 3, True, True)), CPU)
    inputs.tensors["slot_mapping"].fill_(7)
    inputs.clear()
    assert (inputs.tensors["slot_mapping"] == -1).all() and (inputs.tensors["context_lens"] == 0).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 256), st.integers(0, 8192), st.booleans())
def test_every_step_has_a_bucket(max_num_seqs, more_tokens, rounded):
    buckets = Buckets(max_num_seqs, max_num_seqs + more_tokens, 100, 8, True, rounded)
    assert buckets.decode_sizes()[-1] == max_num_seqs and buckets.mixed_sizes()[-1] == max_num_seqs + more_tokens
    for sizes in (buckets.decode_sizes(), buckets.mixed_sizes(), buckets.sequence_sizes()):
        assert sizes == sorted(set(sizes))
    for sequences in {1, max_num_seqs // 2 + 1, max_num_seqs}:
        for tokens in {
            sequences,
            min(sequences + more_tokens // 3, sequences + more_tokens),
            max_num_seqs + more_tokens,
        }:
            for rows in {sequences, min(tokens, sequences + SCORED_ROWS)}:  # of logits: also a prompt's, to score it
                bucket = buckets.pick(FakePlan(tokens, sequences, tokens == sequences, logits_indices=range(rows)))
                most = max_num_seqs if rows <= max_num_seqs else buckets.logit_rows
                assert tokens <= bucket.tokens <= max(buckets.max_num_batched_tokens, 1)
                assert rows <= bucket.sequences <= most
                assert bucket.decode == (tokens == sequences) and bucket.lora


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 256), st.integers(1, 7), st.booleans())
def test_every_step_with_drafts_has_a_bucket(max_num_seqs, most, rounded):
    """One that has room for its tokens and for each sequence's rows, on a GPU a captured one; one bucket holds all."""
    buckets = Buckets(max_num_seqs, 8192, 100, 8, True, rounded, most)
    captured, holds_all = set(buckets.captured_buckets()), buckets.largest_of_each_kind()[-1]
    assert buckets.sampled_rows >= max(max_num_seqs, holds_all.tokens)
    for sequences in {1, max_num_seqs // 3 + 1, max_num_seqs // 2 + 1, max_num_seqs}:
        drafts = min(most, drafts_within(sequences, 8192))
        alone = [drafts] + [0] * (sequences - 1)  # one sequence has drafts, the others none
        for each in (alone, [drafts] * sequences) if drafts else ():
            tokens = sequences + sum(each)
            plan = FakePlan(tokens, sequences, False, range(tokens))
            plan.verifies, plan.drafts = True, np.array(each, np.int32)
            bucket = buckets.pick(plan)
            assert bucket.rows >= 1 + drafts, "the kernels take no more rows of a sequence"
            assert bucket.verifies and bucket.lora and not bucket.decode and (rounded or bucket in captured)
            assert tokens <= bucket.tokens <= holds_all.tokens and sequences <= bucket.sequences <= holds_all.sequences


class FakePlan:
    uses_lora = True
    verifies = False

    def __init__(self, tokens, sequences, decode, logits_indices):
        self.num_tokens, self.num_sequences, self.decode = tokens, sequences, decode
        self.logits_indices = logits_indices


def test_bucket_sizes():
    buckets = Buckets(256, 8192, 100, 8, True)
    assert buckets.decode_sizes()[:10] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56] and buckets.decode_sizes()[-2:] == [
        240,
        256,
    ]
    assert buckets.mixed_sizes() == [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert {bucket.lora for bucket in buckets.decode_buckets()} == {True, False}
    assert {bucket.lora for bucket in Buckets(4, 64, 10, 2, False).decode_buckets()} == {False}


def test_every_size_of_a_prompts_step_is_warmed_up() -> None:
    for lora in (True, False):
        buckets = Buckets(16, 256, 10, 2, lora)
        warm = buckets.warm_up_buckets()
        assert {(bucket.tokens, bucket.lora) for bucket in warm} == {
            (tokens, twin) for tokens in buckets.mixed_sizes() for twin in {lora, False}
        }
        assert not any(bucket.decode for bucket in warm)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(1, 64), (8, 64), (100, 512), (256, 8192)])
def test_no_mixed_step_needs_a_program_that_a_start_has_not_made(max_num_seqs: int, tokens: int, lora: bool) -> None:
    buckets, source = Buckets(max_num_seqs, tokens, 100, 8, lora), random.Random(0)
    made = [*buckets.warm_up_buckets(), *buckets.later_buckets()]
    assert len(set(made)) == len(made)
    for _ in range(300):
        rows = source.randint(1, min(max_num_seqs, tokens))
        plan = FakePlan(source.randint(rows, tokens), rows, False, range(rows))
        plan.uses_lora = source.random() < 0.5
        assert buckets.pick(plan) in made, (plan.num_tokens, rows)
