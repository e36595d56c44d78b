"""Step plans and results as flat bytes between the batcher and the GPU process: a fixed header of int32, then the
arrays one after another.

Both ends are the same release on the same machine, so the numbers travel in its own byte order. Arrays of 8-byte
elements come first, so that each array is aligned and is read in place (read-only).
"""

import math

import numpy as np

from .step_plan import Int32, SamplingPlan, StepDrafts, StepMasks, StepPlan, StepResult, no_rows

_LONG = ("seeds", "steps")
_SAMPLING_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "bias_values",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_SAMPLING_INTS = (
    "top_k",
    "bias_rows",
    "bias_tokens",
    "allowed_rows",
    "allowed_tokens",
    "history_rows",
    "history_tokens",
    "history_counts",
)
_PLAN = (
    "input_ids",
    "positions",
    "slot_mapping",
    "adapter_index",
    "context_lens",
    "query_start",
    "logits_indices",
    "scored_rows",
    "scored_tokens",
    "sample_rows",
    "feed_positions",
    "feed_rows",
    "masked_rows",
    "follow_rows",
    "drafts",
    "told_rows",
    "told_lengths",
    "told_tokens",
    "rings",
    "ring_ends",
    "ring_filled",
    "next_tokens",
)
_EMPTY: dict[type, np.ndarray] = {dtype: np.zeros(0, dtype) for dtype in (np.int64, np.float32, np.int32)}
# step, decode, greedy, num_logprobs, num_prompt_logprobs, rows of the block table, of slot_loads and of kept
_FLAGS = 8
_HEADER = _FLAGS + len(_LONG) + len(_SAMPLING_FLOATS) + len(_SAMPLING_INTS) + len(_PLAN) + 1


def pack_plan(plan: StepPlan) -> bytes:
    """A plan as one frame."""
    sampling = plan.sampling
    arrays = [getattr(sampling, name) for name in _LONG]
    arrays += [getattr(sampling, name) for name in _SAMPLING_FLOATS]
    arrays += [getattr(sampling, name) for name in _SAMPLING_INTS]
    arrays += [getattr(plan, name) for name in _PLAN]
    table, loads = plan.block_table, plan.slot_loads
    flags = [plan.step, plan.decode, sampling.greedy, sampling.num_logprobs, sampling.num_prompt_logprobs]
    flags += [len(table), len(loads), len(plan.kept)]
    head = np.asarray(flags + [len(array) for array in arrays] + [table.shape[1]], np.int32)
    padding = b"" if _HEADER % 2 == 0 else bytes(4)
    parts = (*arrays, loads, plan.kept, table)
    return b"".join([head.tobytes(), padding, *(array.tobytes() for array in parts)])


def unpack_plan(frame: bytes | bytearray) -> StepPlan:
    """The plan in a frame of `pack_plan`; its arrays lie in the frame.

    Raises ValueError for a frame that is cut short.
    """
    head = np.frombuffer(frame, np.int32, _HEADER).tolist()
    step, decode, greedy, num_logprobs, num_prompt_logprobs, rows, loads, kept_rows = head[:_FLAGS]
    at = (_HEADER + _HEADER % 2) * 4
    lengths = iter(head[_FLAGS:])

    def take(dtype: type, count: int) -> np.ndarray:
        nonlocal at
        if not count:
            return _EMPTY[dtype]
        array: np.ndarray = np.frombuffer(frame, dtype, count, at)
        at += array.nbytes
        return array

    long = {name: take(np.int64, next(lengths)) for name in _LONG}
    floats = {name: take(np.float32, next(lengths)) for name in _SAMPLING_FLOATS}
    ints = {name: take(np.int32, next(lengths)) for name in _SAMPLING_INTS}
    arrays = {name: take(np.int32, next(lengths)) for name in _PLAN}
    slot_loads = take(np.int32, 2 * loads).reshape(-1, 2)
    kept = take(np.int32, 5 * kept_rows).reshape(-1, 5)
    columns = next(lengths)
    block_table = take(np.int32, rows * columns).reshape(rows, columns)
    sampling = SamplingPlan(
        greedy=bool(greedy),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        **long,
        **floats,
        **ints,
    )
    return StepPlan(
        step=step,
        decode=bool(decode),
        block_table=block_table,
        slot_loads=slot_loads,
        kept=kept,
        sampling=sampling,
        **arrays,
    )


def pack_masks(masks: StepMasks) -> bytes:
    """Masks as one frame."""
    head = np.asarray([masks.step, *masks.words.shape], np.int32)
    parts = (head, masks.rows, masks.places, np.ascontiguousarray(masks.words))
    return b"".join(part.data for part in parts)


def unpack_masks(frame: bytes | bytearray | memoryview) -> StepMasks:
    """The masks in a frame of `pack_masks`. Raises ValueError for a frame that is cut short."""
    step, count, words = np.frombuffer(frame, np.int32, 3).tolist()
    if not count:
        return StepMasks(step, no_rows(), no_rows(), np.zeros((0, words), np.int32))
    rows, places = np.frombuffer(frame, np.int32, 2 * count, 12).reshape(2, count)
    masks = np.frombuffer(frame, np.int32, count * words, 12 + 8 * count).reshape(count, words)
    return StepMasks(step, rows, places, masks)


def pack_placed(masks: StepMasks, offset: int, stride: int) -> bytes:
    """Masks as one frame that says where their words lie: at which byte of memory that both sides have, and how many
    bytes lie between two masks' first words.
    """
    head = np.asarray([masks.step, offset, stride, *masks.words.shape], np.int32)
    return b"".join(part.data for part in (head, masks.rows, masks.places))


def unpack_placed(frame: bytes | memoryview) -> tuple[int, tuple[int, int, int, int], Int32, Int32]:
    """(step, (offset, stride, masks, words of each), rows, places) of a frame of `pack_placed`. Raises ValueError for a
    frame that is cut short.
    """
    step, offset, stride, count, words = np.frombuffer(frame, np.int32, 5).tolist()
    rows, places = np.frombuffer(frame, np.int32, 2 * count, 20).reshape(2, count)
    return step, (offset, stride, count, words), rows, places


def pack_drafts(drafts: StepDrafts) -> bytes:
    """Drafts as one frame."""
    head = np.asarray([drafts.step, *drafts.tokens.shape], np.int32)
    return head.tobytes() + drafts.tokens.astype(np.int32, copy=False).tobytes()


def unpack_drafts(frame: bytes) -> StepDrafts:
    """The drafts in a frame of `pack_drafts`. Raises ValueError for a frame that is cut short."""
    step, rows, columns = np.frombuffer(frame, np.int32, 3).tolist()
    tokens = np.frombuffer(frame, np.int32, rows * columns, 12) if rows * columns else no_rows()
    return StepDrafts(step, tokens.reshape(rows, columns))


def pack_result(result: StepResult) -> bytes:
    """A result as one frame."""
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
    """The result in a frame of `pack_result`. Raises ValueError for a frame that is cut short."""
    step, compiled, count, drafted, looked_up, *shapes = np.frombuffer(frame, np.int32, 9).tolist()
    at = 36

    def take(dtype: type, *shape: int) -> np.ndarray:
        nonlocal at
        size = math.prod(shape)
        array: np.ndarray = (np.frombuffer(frame, dtype, size, at) if size else np.zeros(0, dtype)).reshape(shape)
        at += array.nbytes
        return array

    tokens, accepted, sources = take(np.int32, count), take(np.int32, drafted), take(np.int32, looked_up)

    def reported(rows: int, columns: int) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        if not columns:
            return None, None, None
        ranks, ids = take(np.int32, rows), take(np.int32, rows, columns)
        return ids, take(np.float32, rows, columns), ranks

    answers, prompts = reported(*shapes[:2]), reported(*shapes[2:])
    drafts = accepted if drafted else None, sources if looked_up else None
    return StepResult(step, tokens, *answers, *prompts, *drafts, compiled)
