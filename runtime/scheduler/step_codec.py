"""Step plans, masks, drafts and results as bytes between the batcher and the GPU process: an int32 header, then arrays.

Both sides are the same release on the same machine, so numbers have its byte order. Arrays of 8-byte elements come
first: then each array is aligned, and is read in place (read-only). The unpack functions raise ValueError for a
truncated frame.
"""

import math
from dataclasses import fields

import numpy as np

from .step_plan import Float32, Int32, Int64, SamplingPlan, StepDrafts, StepMasks, StepPlan, StepResult, no_rows


def _names(owner: type[SamplingPlan] | type[StepPlan], kind: object) -> tuple[str, ...]:
    return tuple(each.name for each in fields(owner) if each.type == kind)


_MATRICES = ("slot_loads", "kept", "block_table")
_DTYPES = ((Int64, np.int64), (Float32, np.float32), (Int32, np.int32))
_SAMPLING = tuple((name, dtype) for kind, dtype in _DTYPES for name in _names(SamplingPlan, kind))
_PLAN = tuple(name for name in _names(StepPlan, Int32) if name not in _MATRICES)
_EMPTY: dict[type, np.ndarray] = {dtype: np.zeros(0, dtype) for _, dtype in _DTYPES}
# step, decode, cascade, greedy, num_logprobs, num_prompt_logprobs, numbers of rows of block table, slot_loads and kept
_FLAGS = 9
_HEADER = _FLAGS + len(_SAMPLING) + len(_PLAN) + 1
_PADDING = bytes(4 * (_HEADER % 2))


def pack_plan(plan: StepPlan) -> bytes:
    """Return a plan as one frame."""
    sampling = plan.sampling
    arrays = [getattr(sampling, name) for name, _ in _SAMPLING]
    arrays += [getattr(plan, name) for name in _PLAN]
    table, loads, kept = plan.block_table, plan.slot_loads, plan.kept
    flags = [plan.step, plan.decode, plan.cascade, sampling.greedy, sampling.num_logprobs, sampling.num_prompt_logprobs]
    flags += [len(table), len(loads), len(kept)]
    head = np.asarray(flags + [len(array) for array in arrays] + [table.shape[1]], np.int32)
    return b"".join([head.tobytes(), _PADDING, *(array.tobytes() for array in (*arrays, loads, kept, table))])


def unpack_plan(frame: bytes | bytearray) -> StepPlan:
    """Return the plan in a frame; its arrays are views of the frame."""
    head = np.frombuffer(frame, np.int32, _HEADER).tolist()
    step, decode, cascade, greedy, num_logprobs, num_prompt_logprobs, rows, loads, kept = head[:_FLAGS]
    at = _HEADER * 4 + len(_PADDING)
    lengths = iter(head[_FLAGS:])

    def take(dtype: type, count: int) -> np.ndarray:
        nonlocal at
        if not count:
            return _EMPTY[dtype]
        array: np.ndarray = np.frombuffer(frame, dtype, count, at)
        at += array.nbytes
        return array

    sampling = {name: take(dtype, next(lengths)) for name, dtype in _SAMPLING}
    arrays = {name: take(np.int32, next(lengths)) for name in _PLAN}
    arrays["slot_loads"] = take(np.int32, 2 * loads).reshape(-1, 2)
    arrays["kept"] = take(np.int32, 5 * kept).reshape(-1, 5)
    columns = next(lengths)
    arrays["block_table"] = take(np.int32, rows * columns).reshape(rows, columns)
    return StepPlan(
        step=step,
        decode=bool(decode),
        cascade=bool(cascade),
        sampling=SamplingPlan(
            greedy=bool(greedy), num_logprobs=num_logprobs, num_prompt_logprobs=num_prompt_logprobs, **sampling
        ),
        **arrays,
    )


def pack_masks(masks: StepMasks) -> bytes:
    """Return masks as one frame."""
    head = np.asarray([masks.step, *masks.words.shape], np.int32)
    return b"".join(part.data for part in (head, masks.rows, masks.places, np.ascontiguousarray(masks.words)))


def unpack_masks(frame: bytes | bytearray | memoryview) -> StepMasks:
    """Return the masks in a frame of `pack_masks`."""
    step, count, words = np.frombuffer(frame, np.int32, 3).tolist()
    if not count:
        return StepMasks(step, no_rows(), no_rows(), np.zeros((0, words), np.int32))
    rows, places = np.frombuffer(frame, np.int32, 2 * count, 12).reshape(2, count)
    masks = np.frombuffer(frame, np.int32, count * words, 12 + 8 * count).reshape(count, words)
    return StepMasks(step, rows, places, masks)


def pack_placed(masks: StepMasks, offset: int, stride: int) -> bytes:
    """Return masks in shared memory as one frame: `offset` of the first word and `stride` between masks, in bytes."""
    head = np.asarray([masks.step, offset, stride, *masks.words.shape], np.int32)
    return b"".join(part.data for part in (head, masks.rows, masks.places))


def unpack_placed(frame: bytes | memoryview) -> tuple[int, tuple[int, int, int, int], Int32, Int32]:
    """Return (step, (offset, stride, number of masks, words per mask), rows, places) of a frame of `pack_placed`."""
    step, offset, stride, count, words = np.frombuffer(frame, np.int32, 5).tolist()
    rows, places = np.frombuffer(frame, np.int32, 2 * count, 20).reshape(2, count)
    return step, (offset, stride, count, words), rows, places


def pack_drafts(drafts: StepDrafts) -> bytes:
    """Return drafts as one frame."""
    head = np.asarray([drafts.step, *drafts.tokens.shape], np.int32)
    return head.tobytes() + drafts.tokens.astype(np.int32, copy=False).tobytes()


def unpack_drafts(frame: bytes) -> StepDrafts:
    """Return the drafts in a frame of `pack_drafts`."""
    step, rows, columns = np.frombuffer(frame, np.int32, 3).tolist()
    tokens = np.frombuffer(frame, np.int32, rows * columns, 12) if rows * columns else no_rows()
    return StepDrafts(step, tokens.reshape(rows, columns))


def pack_result(result: StepResult) -> bytes:
    """Return a result as one frame."""
    groups = (
        (result.ranks, result.logprob_tokens, result.logprobs),
        (result.prompt_ranks, result.prompt_tokens, result.prompt_logprobs),
    )
    accepted, sources = (no_rows() if each is None else each for each in (result.accepted, result.sources))
    head = [result.step, result.compiled, len(result.tokens), len(accepted), len(sources)]
    parts = [each.astype(np.int32, copy=False) for each in (result.tokens, accepted, sources)]
    for ranks, tokens, logprobs in groups:
        if ranks is None or tokens is None or logprobs is None:
            head += [0, 0]
            continue
        head += tokens.shape
        parts += [part.astype(np.int32, copy=False) for part in (ranks, tokens)]
        parts.append(logprobs.astype(np.float32, copy=False))
    return b"".join([np.asarray(head, np.int32).tobytes(), *(part.tobytes() for part in parts)])


def unpack_result(frame: bytes) -> StepResult:
    """Return the result in a frame of `pack_result`."""
    step, compiled, count, num_accepted, num_sources, *shapes = np.frombuffer(frame, np.int32, 9).tolist()
    at = 36

    def take(dtype: type, *shape: int) -> np.ndarray:
        nonlocal at
        size = math.prod(shape)
        array: np.ndarray = (np.frombuffer(frame, dtype, size, at) if size else np.zeros(0, dtype)).reshape(shape)
        at += array.nbytes
        return array

    tokens, accepted, sources = take(np.int32, count), take(np.int32, num_accepted), take(np.int32, num_sources)

    def logprobs(rows: int, columns: int) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        if not columns:
            return None, None, None
        ranks, ids = take(np.int32, rows), take(np.int32, rows, columns)
        return ids, take(np.float32, rows, columns), ranks

    outputs, prompts = logprobs(*shapes[:2]), logprobs(*shapes[2:])
    drafts = accepted if num_accepted else None, sources if num_sources else None
    return StepResult(step, tokens, *outputs, *prompts, *drafts, compiled)
