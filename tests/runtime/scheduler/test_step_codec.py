"""Plans and results survive the way between processes, whatever is in them."""

import dataclasses

import numpy as np
import pytest
from sidestream.runtime.scheduler.step_codec import (
    pack_drafts,
    pack_masks,
    pack_plan,
    pack_result,
    unpack_drafts,
    unpack_masks,
    unpack_plan,
    unpack_result,
)
from sidestream.runtime.scheduler.step_plan import SamplingPlan, StepDrafts, StepMasks, StepPlan, StepResult

FLOATS = {"temperature", "top_p", "min_p", "bias_values", "presence_penalty", "frequency_penalty", "repetition_penalty"}


def some(generator, name: str, count: int) -> np.ndarray:
    if name in FLOATS:
        return generator.standard_normal(count).astype(np.float32)
    wide = name in ("seeds", "steps")
    return generator.integers(
        -(1 << 62 if wide else 1 << 31), (1 << 62 if wide else 1 << 31) - 1, count, dtype=np.int64 if wide else np.int32
    )


def random_plan(generator) -> StepPlan:
    sampling = {
        field.name: some(generator, field.name, int(generator.integers(0, 9)))
        for field in dataclasses.fields(SamplingPlan)
    }
    sampling |= {"greedy": bool(generator.integers(2)), "num_logprobs": int(generator.integers(-1, 21))}
    sampling["num_prompt_logprobs"] = int(generator.integers(-1, 21))
    plan = {
        field.name: some(generator, field.name, int(generator.integers(0, 9))) for field in dataclasses.fields(StepPlan)
    }
    rows, columns, loads, kept = generator.integers(0, 5, 4).tolist()
    plan |= {
        "step": int(generator.integers(0, 1 << 31)),
        "decode": bool(generator.integers(2)),
        "cascade": bool(generator.integers(2)),
        "sampling": SamplingPlan(**sampling),
        "block_table": some(generator, "block_table", rows * columns).reshape(rows, columns),
        "slot_loads": some(generator, "", 2 * loads).reshape(-1, 2),
        "kept": some(generator, "", 5 * kept).reshape(-1, 5),
    }
    return StepPlan(**plan)


def same(first, second) -> bool:
    for field in dataclasses.fields(first):
        left, right = getattr(first, field.name), getattr(second, field.name)
        if dataclasses.is_dataclass(left):
            assert same(left, right)
        elif isinstance(left, np.ndarray):
            assert left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes(), (
                field.name
            )
        else:
            assert left == right and type(left) is type(right), field.name
    return True


@pytest.mark.parametrize("seed", range(30))
def test_every_field_of_a_plan_arrives(seed):
    plan = random_plan(np.random.default_rng(seed))
    frame = pack_plan(plan)
    back = unpack_plan(bytearray(frame))
    assert same(plan, back)
    assert back.input_ids.flags.aligned and back.sampling.seeds.flags.aligned
    with pytest.raises(ValueError):
        unpack_plan(frame[: len(frame) // 2])


@pytest.mark.parametrize("prompts", [0, 3])
@pytest.mark.parametrize("columns", [0, 1, 4])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_results(rows, columns, prompts):
    generator = np.random.default_rng(rows + columns)

    def reported(count: int) -> list[np.ndarray | None]:
        if not count or not columns:
            return [None, None, None]
        return [
            some(generator, "", count * columns).reshape(count, columns),
            generator.standard_normal((count, columns)).astype(np.float32),
            some(generator, "", count),
        ]

    drafts = [some(generator, "", rows) if rows and columns > least else None for least in (0, 1)]
    result = StepResult(7, some(generator, "", rows), *reported(rows), *reported(prompts), *drafts, compiled=rows)
    frame = pack_result(result)
    assert same(result, unpack_result(frame))
    with pytest.raises(ValueError):
        unpack_result(frame[:-4])


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_masks_and_drafts(rows, columns):
    generator = np.random.default_rng(rows + columns)
    table = some(generator, "", 2 * rows * columns).reshape(rows, 2 * columns)
    masks = StepMasks(7, some(generator, "", rows), some(generator, "", rows), table[:, :columns])
    drafts = StepDrafts(9, table[:, ::2])
    for said, pack, unpack in ((masks, pack_masks, unpack_masks), (drafts, pack_drafts, unpack_drafts)):
        frame = pack(said)
        assert same(said, unpack(frame))
        with pytest.raises(ValueError):
            unpack(frame[:-4])
    assert unpack_drafts(pack_drafts(StepDrafts(3, table[:0, :0]))).tokens.shape == (0, 0)
