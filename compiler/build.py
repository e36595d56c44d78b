"""A captured, optimized graph and a bucket in, a Program out; and the store that keeps programs between runs."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from ..ops.core.device import H200_SMS
from .options import CompileOptions
from .pipeline import DECODE_PASSES, PROMPT_PASSES, run_static_passes
from .program.buffers import ProgramError
from .program.lower import lower
from .program.memory import plan_memory
from .program.program import VERSION, Bucket, Edit, Program
from .program.schedule import schedule
from .program.sizes import Spec
from .program.specialize import specialize
from .records import PassRecord, pass_table

log = logging.getLogger(__name__)


def build_program(
    graph_module: fx.GraphModule,
    sizes: Bucket | Mapping[str, Spec],
    options: CompileOptions | None = None,
    *,
    sm_count: int = H200_SMS,
) -> Program:
    """Specialize, schedule and lay out one program.

    `sizes`: a bucket, or placeholder name -> (shape, dtype), example tensor or integer. `options.lora_lowering` decides
    whether side-lane nodes get their own stream (`auto`: in decode buckets). Raises ProgramError
    (SpecializeError) when the graph does not fit these sizes.
    """
    options = options or CompileOptions()
    bucket = sizes if isinstance(sizes, Bucket) else None
    records: list[PassRecord] = []

    own = () if bucket is None else DECODE_PASSES if bucket.decode else PROMPT_PASSES

    def rewrite(graph: fx.Graph) -> bool:
        records.extend(run_static_passes(graph, options, sm_count, own))
        return any(record.matches for record in records)

    draft = lower(specialize(graph_module, sizes, rewrite=rewrite if own else None))
    two_streams = options.lora_lowering == "side_stream" or (
        options.lora_lowering == "auto" and bucket is not None and bucket.decode
    )
    steps = schedule(
        draft.operations, two_streams=two_streams, sm_count=sm_count, side_share=options.lora_sm_share, pdl=options.pdl
    )
    buffers, arena_bytes = plan_memory(draft.buffers, steps)
    return Program(
        bucket,
        buffers,
        steps,
        arena_bytes,
        draft.outputs,
        draft.recipes,
        single_output=draft.single_output,
        passes=_pass_text(records),
    )


def _pass_text(records: Sequence[PassRecord]) -> str:
    """The table of a program's own passes, and each near-miss; empty when there were none."""
    refused = "".join(f"{record.name}: {reason}\n" for record in records for reason in record.rejected)
    return pass_table(records) + refused if records else ""


def program_key(
    versions: Mapping[str, str],
    config: Mapping[str, Any],
    options: CompileOptions,
    passes: Sequence[str],
    bucket: Bucket | None,
) -> str:
    """The sha256 (hex) under which a program is kept: it changes with every one of these."""
    content = {
        "program_version": VERSION,
        "versions": dict(versions),
        "config": dict(config),
        "options": options.to_dict(),
        "passes": list(passes),
        "bucket": None if bucket is None else vars(bucket),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


class ProgramStore:
    """Programs in a directory, one JSON file a key. What can't be read counts as absent."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def path(self, key: str) -> Path:
        """Where the program of `key` lies."""
        return self.directory / f"{key}.json"

    def load(self, key: str, edit: Edit | None = None) -> Program | None:
        """The program kept under `key`, its fields changed by `edit`; None when there is none, or only a damaged or
        outdated one (logged).
        """
        try:
            return Program.load(self.path(key), edit)
        except FileNotFoundError:
            return None
        except (ProgramError, OSError) as error:
            log.warning("a kept program is left out: %s", error)
            return None

    def save(self, key: str, program: Program) -> Path:
        """Keep `program` under `key`; readers see the old file or the whole new one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
        os.close(handle)
        try:
            program.save(temporary)
            os.replace(temporary, self.path(key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return self.path(key)
