"""Find out which kernels give a token the same bits in every batch, on one GPU within three minutes.

    python -m sidestream.tools.dev.bench.exactness_lab -o exactness.json
    python -m sidestream.tools.dev.bench.exactness_lab --only decode prompt
    python -m sidestream.tools.dev.bench.exactness_lab --dry-run                 # the cases, without a GPU

Each case is printed as soon as it is measured. A case that fails is reported and leaves the others. Data is random.
  cublas  does a row of a bf16 product depend on its place, on the other rows, or on their number?
  prompt  how many rows of prompt attention depend on the size of the chunks?
  decode  which constants of decode attention must be equal so that a sequence has the same bits in every batch?
  linear  do all int8 kernels behind `linear_8bit` give the bits of one formula, for every number of rows?
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....ops.attention import decode_gluon
from ....ops.attention.numerics import LOG2_E, split_workspace
from ....ops.attention.paged_attention import paged_attention
from ....ops.attention.prefill_gluon import tile_tokens
from ....ops.attention.widen_kv import FEWEST_TILES, widen_kv, widen_plan
from ....ops.core.device import multiprocessors
from ....ops.core.kv_layout import PAGE_SIZE, kv_cache_shape, kv_scales_shape
from ....ops.core.triton_support import cdiv, next_power_of_2
from ....ops.linear.kernel_selection import LinearConfig, candidates, linear_config, work_split
from ....ops.linear.linear_8bit import launch_config
from ...options.environment import collect
from ...options.models import SHAPES, shape_fields
from ...tuning.table import show
from ...tuning.tune import LAYERS, jobs_of

QUESTIONS = ("cublas", "prompt", "decode", "linear")
BF16, INT8, INT32 = torch.bfloat16, torch.int8, torch.int32
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3.1-8B's
GROUP = HEADS // KV_HEADS
DENSE = [name for name in LAYERS if not name.startswith("experts_")]
TOKENS = (1, 8, 64, 256, 2048)  # rows of a linear
MOST_LOGITS = 256  # rows of the output projection
PLACE = 16  # first row of launches that start in the middle
CHUNKS = (1, 17, 64, 512, 2048)
PROMPT = 4096
CONTEXTS = (4090, 4096)  # with the second one drafts start a page
RAGGED = tuple(64 << step for step in range(8)) * 8  # 64 sequences of 64..8192 tokens
PAGES = 1024
SPLITS = {"splits": 8, "min_pages": 2, "whole": 4}
PAGES_OF_8 = {"splits": 64, "min_pages": 8, "whole": 1}  # a program owns eight pages, counted from the first one
OTHERS = {"warps": 4, "stages": 3, "columns": 8, "step": 16}
FORCED: dict[str, dict[str, int]] = {
    "none (today)": {},
    "only splits": SPLITS,
    "all but splits": OTHERS,
    "all": OTHERS | SPLITS,
    "all, splits of 8 pages": OTHERS | PAGES_OF_8,
    **{
        f"all but {name}, splits of 8 pages": {k: v for k, v in (OTHERS | PAGES_OF_8).items() if k != name}
        for name in ("warps", "columns", "step")
    },
}
Figures = dict[str, Any]
Cache = tuple[torch.Tensor, torch.Tensor]
Case = tuple[str, str, Callable[[], Figures]]  # question, name, measurement


class Batch(NamedTuple):
    """Contexts of a decode step of `rows` rows per sequence, and the row of its queries that is compared."""

    contexts: tuple[int, ...]
    rows: int
    row: int


def all_cases(models: Mapping[str, Any], device: str) -> Iterator[Case]:
    """Yield the cases of all questions; those of cuBLAS are the linears of the first model, without the logits."""
    first = dict([next(iter(models.items()))])
    for job, _ in jobs_of(first, [name for name in DENSE if name != "lm_head"], [TOKENS[-1]], "int8"):
        yield "cublas", f"{job.layer} [{job.n}, {job.k}]", partial(measure_cublas, job.n, job.k, device)
    for chunk, wide in product(CHUNKS, (False, True)):
        if not wide or chunk >= FEWEST_TILES * tile_tokens(HEADS, KV_HEADS):  # others are not widened in a step
            name = f"chunks of {chunk}" + (", widened" if wide else "")
            yield "prompt", name, partial(measure_prompt, PROMPT, chunk, wide, device)
    for context, (name, forced) in product(CONTEXTS, FORCED.items()):
        yield "decode", f"{context} tokens, forced: {name}", partial(measure_decode, context, forced, device)
    for job, _ in jobs_of(dict(models), DENSE, [TOKENS[-1]], "int8"):
        counts = tuple(count for count in TOKENS if job.layer != "lm_head" or count <= MOST_LOGITS)
        yield "linear", f"{job.layer} [{job.n}, {job.k}]", partial(measure_linear, job.n, job.k, counts, device)


def difference(got: torch.Tensor, want: torch.Tensor) -> Figures:
    """Return the fractions of rows and of values with other bits, and the largest difference, of 16-bit tensors."""
    other = got.contiguous().view(torch.int16) != want.contiguous().view(torch.int16)
    largest = float((got.float() - want.float()).abs().max())
    return {"rows": float(other.any(-1).float().mean()), "values": float(other.float().mean()), "largest": largest}


def compile_all(launches: Sequence[Callable[[], Any]]) -> None:
    """Run launches in several threads, so that kernels compile at the same time. Failures show when they run again."""

    def attempt(launch: Callable[[], Any]) -> None:
        torch.cuda.set_device(0)
        with suppress(Exception):
            launch()

    if torch.cuda.is_available():
        with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
            list(pool.map(attempt, launches))
        torch.cuda.synchronize()


def measure_cublas(n: int, k: int, device: str, counts: Sequence[int] = (*TOKENS[:-1], 512, 2048)) -> Figures:
    """Return the fractions of rows of x [T, K] @ weight [N, K]^T that change with their place and with other rows.

    Numbers of rows are grouped by the bits of the first row.
    """
    x, weight = (torch.randn(rows, k, device=device).to(BF16) for rows in (counts[-1], n))
    results = {count: x[:count] @ weight.T for count in counts}
    permuted, neighbours, alike = {}, {}, list[list[int]]()
    for count in counts:
        order, half = torch.randperm(count, device=device), cdiv(count, 2)
        permuted[count] = difference(x[order] @ weight.T, results[count][order])["rows"]
        others = torch.cat([x[:half], torch.randn(count - half, k, device=device).to(BF16)])
        neighbours[count] = difference((others @ weight.T)[:half], results[count][:half])["rows"]
        same = [group for group in alike if not difference(results[group[0]][:1], results[count][:1])["rows"]]
        if same:
            same[0].append(count)
        else:
            alike.append([count])
    return {"in other places": permuted, "beside other rows": neighbours, "numbers of rows with the same bits": alike}


def random_cache(pages: int, device: str) -> Cache:
    """Return a cache of `pages` pages in int8, and its scales."""
    kv = torch.randint(-100, 101, kv_cache_shape(pages, KV_HEADS, HEAD_DIM), device=device, dtype=INT8)
    return kv, torch.rand(kv_scales_shape(pages, KV_HEADS), device=device) * 0.02 + 0.01


def measure_prompt(length: int, chunk: int, widened: bool, device: str) -> Figures:
    """Return the difference of a prompt's rows in chunks from those in chunks of 2,048 tokens that are not widened."""
    torch.manual_seed(0)
    pages, tile = cdiv(length, PAGE_SIZE), tile_tokens(HEADS, KV_HEADS)
    cache, table = random_cache(pages, device), torch.randperm(pages, device=device).to(INT32)[None]
    q = torch.randn(length, HEADS, HEAD_DIM, device=device).to(BF16)

    def attend(first: int, size: int, widened: bool) -> torch.Tensor:
        part = q[first : first + size]
        lens = torch.tensor([first + len(part)], dtype=INT32, device=device)
        starts = torch.tensor([0, len(part)], dtype=INT32, device=device)
        wide = plan = None
        if widened:
            plan, listed = widen_plan(table, lens, starts, tile, cdiv(pages, 2))
            wide = widen_kv(*cache, listed)
        result: torch.Tensor = paged_attention(
            part, *cache, table, lens, starts, HEAD_DIM**-0.5, False, False, wide, plan
        )
        return result

    got = torch.cat([attend(first, chunk, widened) for first in range(0, length, chunk)])
    return difference(got, torch.cat([attend(first, CHUNKS[-1], False) for first in range(0, length, CHUNKS[-1])]))


def batches(context: int) -> dict[str, Batch]:
    """Return the batches that compute one row with `context` visible tokens."""
    return {
        "alone": Batch((context,), 1, 0),
        "sequence 5 of 8": Batch((context,) * 8, 1, 4),
        "in 64 ragged": Batch((*RAGGED[:21], context, *RAGGED[22:]), 1, 21),
        "row 5 of 8 drafts": Batch((context + 3,), 8, 4),
    }


def constants_of(batch: Batch, blocks: int, forced: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """Return the constants that `decode_gluon.launch` would choose for a table of `blocks`, or the forced ones."""
    columns = forced.get("columns", decode_gluon.columns_of(GROUP, batch.rows)[0])
    rows = min(batch.rows, columns // GROUP)
    pairs = len(batch.contexts) * KV_HEADS * cdiv(batch.rows, rows)
    chosen = decode_gluon.tiling(pairs, blocks, False, device, columns)._asdict() | dict(forced)
    warps = chosen["warps"]
    step = 8 * warps if batch.rows == 1 else max(8, 32 * warps // next_power_of_2(rows * GROUP))
    return {"columns": columns, "step": step} | chosen


def launch_decode(
    q: torch.Tensor, cache: Cache, table: torch.Tensor, batch: Batch, constants: Mapping[str, int], out: torch.Tensor
) -> None:
    """Fill out [T, HQ * D] as `decode_gluon.launch` does, with these constants."""
    lens = torch.tensor(batch.contexts, dtype=INT32, device=q.device)
    starts = torch.arange(0, len(q) + 1, batch.rows, dtype=INT32, device=q.device) if batch.rows > 1 else lens
    columns, splits, warps = constants["columns"], constants["splits"], constants["warps"]
    rows = min(batch.rows, columns // GROUP)
    tiles, used = cdiv(batch.rows, rows), rows * GROUP
    pairs = len(batch.contexts) * KV_HEADS * tiles
    decode_gluon.decode_kernel[pairs * splits,](
        *decode_gluon.descriptors(*cache), q, table, lens, starts, out,
        *split_workspace(q.device, pairs, splits, used, HEAD_DIM), HEAD_DIM**-0.5 * LOG2_E, table.shape[1], splits,
        None, HK=KV_HEADS, G=GROUP, GROUP=next_power_of_2(used), ROWS=batch.rows, TILES=tiles, COLUMNS=columns,
        BF16=False, SPLIT=splits > 1, MIN_PAGES=constants["min_pages"], WHOLE=constants["whole"],
        STEP=constants["step"], STAGES=constants["stages"], WARPS=warps, PADDED=0, WINDOW=0, PDL=False,
        num_warps=warps, launch_pdl=False,
    )  # fmt: skip


def measure_decode(context: int, forced: Mapping[str, int], device: str) -> Figures:
    """Return, for each batch, one row's difference from the same row alone, and the constants that differ."""
    torch.manual_seed(0)
    cache, query = random_cache(PAGES, device), torch.randn(HEADS, HEAD_DIM, device=device).to(BF16)
    own = torch.randperm(PAGES, device=device).to(INT32)[: cdiv(CONTEXTS[-1], PAGE_SIZE) + 1]
    launches, results, constants = [], dict[str, torch.Tensor](), dict[str, dict[str, int]]()
    for name, batch in batches(context).items():
        sequences, blocks = len(batch.contexts), max(len(own), cdiv(max(batch.contexts), PAGE_SIZE) + 1)
        constants[name] = constants_of(batch, blocks, forced, own.device)
        q = torch.randn(sequences * batch.rows, HEADS, HEAD_DIM, device=device).to(BF16)
        q[batch.row] = query
        table = torch.randint(0, PAGES, (sequences, blocks), device=device, dtype=INT32)
        table[batch.row // batch.rows, : len(own)] = own
        out = torch.full((len(q), HEADS * HEAD_DIM), float("nan"), device=device, dtype=BF16)
        launches.append(partial(launch_decode, q, cache, table, batch, constants[name], out))
        results[name] = out[batch.row : batch.row + 1]
    compile_all(launches)
    for launch in launches:
        launch()
    found: Figures = {"constants alone": constants["alone"]}
    for name, result in results.items():
        other = {key: value for key, value in constants[name].items() if value != constants["alone"][key]}
        found[name] = {**difference(result, results["alone"]), "other constants": other}
    return found


def configs_of(tokens: int, n: int, k: int, sms: int) -> dict[str, LinearConfig]:
    """Return the engine's configuration, and two of each kernel with whole and with shared tiles."""
    taken: Counter[tuple[str, bool]] = Counter()
    chosen = [linear_config(tokens, n, k, sms, n % 16 == 0, True)]
    for config in candidates(tokens, n, k, sms, int8=True):
        kind = config.kernel, work_split(config, tokens, n, k, sms).split
        taken[kind] += 1
        if taken[kind] <= 2:
            chosen.append(config)
    return {show(config): config for config in chosen if config.kernel != "scaled_mm"}


def measure_linear(n: int, k: int, counts: Sequence[int], device: str) -> Figures:
    """Return how many launches of each kernel have the bits of `(sum * scale) * weight_scale`, and which do not."""
    torch.manual_seed(0)
    q, weight = (torch.randint(-127, 128, (rows, k), device=device, dtype=INT8) for rows in (counts[-1], n))
    scale, weight_scale = (torch.rand(rows, device=device) / k**0.5 for rows in (counts[-1], n))
    delta, residual = (torch.randn(counts[-1], n, device=device).to(BF16) for _ in range(2))
    want = torch.cat([(q.double() @ part.double().T).float() for part in weight.split(16384)], dim=1)
    want.mul_(scale[:, None]).mul_(weight_scale)
    wants = {False: want.to(BF16), True: (want + delta.float() + residual.float()).to(BF16)}

    def launch(config: LinearConfig, rows: slice, added: bool) -> torch.Tensor:
        out = torch.full((rows.stop - rows.start, n), float("nan"), device=device, dtype=BF16)
        first, second = (delta[rows], residual[rows]) if added else (None, None)
        sms = multiprocessors(q.device)
        launch_config(config, q[rows], scale[rows], weight, weight_scale, first, second, out, sms=sms)
        return out

    launches = [
        (name, slice(first, first + count), added, partial(launch, config, slice(first, first + count), added))
        for count in counts
        for first in sorted({0, min(PLACE, counts[-1] - count)})
        for name, config in configs_of(count, n, k, multiprocessors(q.device)).items()
        for added in (False, True)
    ]
    compile_all([run for _, rows, _, run in launches if rows.start == 0])
    equal, other, failed = Counter[str](), list[Figures](), dict[str, str]()
    for name, rows, added, run in launches:
        try:
            found = difference(run(), wants[added][rows])
        # a tile that this GPU or Triton does not support: compiler and driver raise various types
        except Exception as problem:
            failed[name] = f"{type(problem).__name__}: {problem}"[:120]
            continue
        equal[name.split()[0]] += not found["rows"]
        if found["rows"]:
            other.append({"config": name, "rows of x": [rows.start, rows.stop], "addends": added, **found})
    return {"launches": len(launches), "equal": dict(equal), "different": other[:8], "failed": failed}


def run_cases(cases: Sequence[Case], seconds: float, output: Path | None) -> Figures:
    """Measure, print and write the cases until the time is over. Return what is written."""
    end, rows = time.perf_counter() + seconds, list[Figures]()
    report = {"environment": collect(), "rows": rows}
    for question, name, measure in cases:
        begin = time.perf_counter()
        try:
            found = measure() if begin < end else {"error": f"left out after {seconds:g} seconds"}
        except Exception as problem:  # the other cases are still worth their time
            found = {"error": f"{type(problem).__name__}: {problem}"[:500]}
        spent = round(time.perf_counter() - begin, 1)
        rows.append({"question": question, "case": name, "seconds": spent, **found})
        print(json.dumps(rows[-1]), flush=True)
        if output is not None:
            output.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lab."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), metavar="NAME|FILE", help="models (default: all)")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=QUESTIONS, help="questions (default: all)")
    parser.add_argument("--seconds", type=float, default=150.0, help="start no case after that (default: %(default)g)")
    parser.add_argument("--dry-run", action="store_true", help="print the cases only")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="JSON file of the figures")
    options = parser.parse_args(arguments)
    if not (options.dry_run or torch.cuda.is_available()):
        raise SystemExit("exactness_lab compares CUDA kernels, and this machine has no GPU; use --dry-run")
    try:
        models = {name: shape_fields(name) for name in options.shape}
    except ValueError as error:
        parser.error(str(error))
    cases = [case for case in all_cases(models, "cuda") if case[0] in options.only]
    if options.dry_run:
        print("\n".join(f"{question:<7} {name}" for question, name, _ in cases))
    else:
        run_cases(cases, options.seconds, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
