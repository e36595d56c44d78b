"""One PEFT adapter, read from disk and checked against its config and the base; unsupported parts are refused."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from .adapter_config import AdapterError
from .adapter_description import AGAIN_FROM_MEMORY, UPDATE, Description, describe_adapter, describe_update
from .config import LlamaConfig
from .families import EXPERT_TARGETS, VOCABULARY_TARGETS
from .files.adapter_file import AdapterFile, readers
from .files.safetensors_file import FLOATING
from .files.update_file import UpdateFile
from .head_layout import arranged
from .ia3 import BIASED_FACTORS, FACTORS, INPUTS, OUTPUTS
from .moe.adapter_layouts import is_expert, is_stack, parts_of, target_of, unpacked
from .vocabulary_rows import ChangedRows, changed_rows, remedy

MODULES_AT_ONCE = 14
_log = logging.getLogger(__name__)
Recall = Callable[[str], str | None]


class Describe(Protocol):
    """Signature of `describe_adapter`, which may run in another process."""

    def __call__(
        self, directory: Path, config: LlamaConfig, max_rank: int, lenient: bool, roots: Sequence[Path] | None, /
    ) -> Description:
        """See `describe_adapter`."""
        ...


DescribeUpdate = Callable[[int, LlamaConfig, int, bool], Description]
"""Signature of `describe_update`, which may run in another process."""


@dataclass(frozen=True)
class Adapter:
    """An adapter without a name.

    rank          the largest r, but of experts; 0: it has no LoRA (IA3)
    expert_rank   the largest r of experts; 0: it has none
    scaling       module (`model.layers.0.self_attn.q_proj`) -> factor of B A
    tensors       module -> A [r, in] and B [out, r] as stored, with the graph's head layout. Experts are modules
                  (`model.layers.0.mlp.experts.3.up_proj`), or a stack (`...experts.gate_up_proj`) with A [E, r, in] and
                  B [E, out, r]
    targets       projections that occur (`q_proj`, ...) and EXPERT_TARGETS, in Llama's order
    content_hash  sha256 (hex) of everything that affects outputs
    differences   contradictions between the tensors and adapter_config.json (the tensors are served)
    source        sha256 (hex) of everything that was read: same source, same content_hash; "" if not computed
    invocation    token ids from whose last occurrence in a prompt on it is active (aLoRA); (): always
    draft         its adapter for a trained draft; it changes no output, but the content_hash includes it
    kinds         its parts besides LoRA, of ADAPTER_PARTS
    parts         module -> kind -> tensor, fp32, with the graph's head layout; the kinds of PART_OF, of IA3
                  FACTORS or BIASED_FACTORS, and after `lora_stacks.resolved` the stacks of PROJECTION_STACKS
    """

    rank: int
    scaling: dict[str, float]
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    targets: tuple[str, ...]
    content_hash: str
    differences: tuple[str, ...] = ()
    source: str = ""
    invocation: tuple[int, ...] = ()
    draft: "Adapter | None" = None
    kinds: tuple[str, ...] = ()
    parts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    expert_rank: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for each in self.tensors.values() for tensor in each) + sum(
            tensor.nbytes for each in self.parts.values() for tensor in each.values()
        )

    @property
    def needs_parts(self) -> bool:
        """Whether its steps run programs with parts: for `kinds`, and for LoRA on the embedding or the output head."""
        return bool(self.kinds or set(self.targets) & set(VOCABULARY_TARGETS))

    @property
    def is_read(self) -> bool:
        """Whether it has its tensors."""
        return bool(self.tensors or self.parts)

    @property
    def bare(self) -> "Adapter":
        """The adapter without tensors."""
        return replace(self, tensors={}, parts={}, draft=None if self.draft is None else self.draft.bare)


def load_adapter(
    path: str | Path,
    config: LlamaConfig,
    max_rank: int,
    lenient: bool = False,
    recall: Recall | None = None,
    roots: Sequence[Path] | None = None,
    describe: Describe = describe_adapter,
    base: Path | None = None,
    with_source: bool = True,
) -> Adapter:
    """Read the PEFT adapter in directory `path` for the base of `config`.

    `max_rank`: the largest rank allowed. `lenient`: ignore unknown fields of adapter_config.json. `recall`: returns the
    stored content hash of a `source`, or None; with a stored hash the values are not checked again and `tensors` is
    empty. `roots`: resolved directories; after all links, each file must be inside one of them (None: anywhere).
    `describe`: reads the config and the weights' header. `base`: the base's checkpoint, for adapters that change rows
    of the embedding or the output head. `with_source`: compute `source`, which hashes the file once more.

    Raises AdapterError like `describe_adapter`, and for NaN, infinity and values that are too large.
    """
    directory = Path(path)
    found = describe(directory, config, max_rank, lenient, roots)
    weights, copies = directory / found.form.weights, found.vocabulary.copies
    with AdapterFile(weights, AdapterError, found.form.again, found.layout, roots, copies) as file:
        adapter, content_hash = _read(file, found, config, max_rank, recall, base, with_source)
    adapter = replace(adapter, content_hash=content_hash())
    for difference in found.differences:
        _log.warning("adapter %r: %s", directory.name, difference)
    return adapter


def load_update(
    update: UpdateFile,
    config: LlamaConfig,
    max_rank: int,
    lenient: bool = False,
    describe: DescribeUpdate = describe_update,
    base: Path | None = None,
) -> tuple[Adapter, Callable[[], str]]:
    """Read an adapter from an update, as `load_adapter` reads one from a directory, but without hashes.

    The second result waits for its content_hash, which other threads compute: that of the same tensors and config in a
    directory.
    """
    found = describe(update.handle, config, max_rank, lenient)
    copies = found.vocabulary.copies
    with AdapterFile(UPDATE, AdapterError, AGAIN_FROM_MEMORY, found.layout, left=copies, update=update) as file:
        return _read(file, found, config, max_rank, None, base, with_source=False)


def _read(
    file: AdapterFile,
    found: Description,
    config: LlamaConfig,
    max_rank: int,
    recall: Recall | None,
    base: Path | None,
    with_source: bool,
) -> tuple[Adapter, Callable[[], str]]:
    """Read and check the tensors of a described adapter; see `load_adapter`. Return it and its content_hash."""
    form = found.form
    file.read(with_source)
    rows = changed_rows(file, found.vocabulary, config, base, max_rank)
    changes = "".join(f"\n{module} {changed.digest.hex()}" for module, changed in rows.items())
    read = f"{found.settings_sum}\n{config!r}\n{file.digest}{changes}"
    source = hashlib.sha256(read.encode()).hexdigest() if with_source else ""
    ranks, scaling = {module: found.rank(module, config) for module in found.pairs}, dict(found.scaling)
    for module, changed in rows.items():
        ranks[module] = ranks.get(module, 0) + len(changed.ids)
        scaling[module] = 1.0
        if ranks[module] > max_rank:
            raise AdapterError(
                f"{module} has LoRA and {len(changed.ids)} rows that differ from the base's, which together need rank "
                f"{ranks[module]}, above the limit of {max_rank}: {remedy(ranks[module])}"
            )
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    content_hash: Callable[[], str]
    known = recall(source) if recall is not None else None
    if known is not None:
        content_hash = partial(str, known)
    else:
        file.check_values()
        for module, (first, second) in found.pairs.items():
            a, b = file.tensor(first), file.tensor(second)
            if form.transposed:
                a, b = a.T.contiguous(), b.T.contiguous()
            if is_stack(module):
                tensors[module] = unpacked(a, b, config.num_experts, found.stacked)
                continue
            for part, row, end in parts_of(config, module):
                tensors[part] = arranged(config, part, "lora_a", a), arranged(config, part, "lora_b", b[row:end])
        for module, changed in rows.items():
            a, b = changed.update(module, config.vocab_size)
            if module in tensors:
                lora_a, lora_b = tensors[module]
                a = torch.cat((a, lora_a.float()))
                b = torch.cat((b, lora_b.float() * found.scaling[module]), 1)
            tensors[module] = a, b
        for module, names in found.parts.items():
            vectors = {kind: _vector(file, module, form.weights, kind, name) for kind, name in names.items()}
            if vectors.keys() & {OUTPUTS, INPUTS}:
                kind = BIASED_FACTORS if module in config.biased_modules() else FACTORS
                vectors = {kind: _factors(vectors, config.stored_shape(module)[0])}
            for part, row, end in config.parts_of(module):
                parts[part] = {kind: arranged(config, part, kind, value[row:end]) for kind, value in vectors.items()}
        content_hash = _content_hash(file, found, rows)  # last: its threads need the interpreter lock, too
    adapter = Adapter(
        rank=max((rank for module, rank in ranks.items() if not is_expert(module)), default=0),
        expert_rank=max((rank for module, rank in ranks.items() if is_expert(module)), default=0),
        scaling={part: scale for module, scale in scaling.items() for part, *_ in parts_of(config, module)},
        tensors=tensors,
        targets=_targets(config, (*ranks, *found.parts)),
        content_hash="",
        differences=found.differences,
        source=source,
        kinds=found.kinds(config),
        parts=parts,
        invocation=found.invocation,
    )
    return adapter, content_hash


def _targets(config: LlamaConfig, modules: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the modules' parts, in the model's order."""
    names = {target_of(part) for module in modules for part, *_ in parts_of(config, module)}
    return tuple(name for name in (*config.projections, *VOCABULARY_TARGETS, *EXPERT_TARGETS) if name in names)


def _vector(file: AdapterFile, module: str, weights: str, kind: str, name: str) -> torch.Tensor:
    """Return a part's tensor [N] in fp32. Raises AdapterError for a magnitude that is not positive."""
    value = file.tensor(name).float().flatten()
    if kind == "magnitude" and not bool((value > 0).all()):
        row = int((value <= 0).nonzero()[0])
        raise AdapterError(
            f"{weights}: {module} has the magnitude {value[row]:g} in row {row} of its lora_magnitude_vector, expected "
            "values above 0: training diverged; use an earlier checkpoint of the adapter"
        )
    return value


def _factors(vectors: Mapping[str, torch.Tensor], outputs: int) -> torch.Tensor:
    """Return the product of IA3's vectors of a module [N]; those of down_proj's inputs are of its last outputs."""
    factors = torch.ones(outputs)
    for vector in vectors.values():
        factors[-len(vector) :] *= vector
    return factors


def _content_hash(file: AdapterFile, found: Description, rows: Mapping[str, ChangedRows]) -> Callable[[], str]:
    """Start to compute a sha256 (hex) over the modules' digests on other threads. The result waits for it."""

    def digest(module: str) -> bytes:
        form = "mlx" if found.mlx else found.stacked if is_stack(module) else ""
        digest = hashlib.sha256(f"{module} {found.scaling.get(module)!r}\n{form}".encode())
        kinds = {name: kind for kind, name in found.parts.get(module, {}).items()}  # their shapes may be equal
        for name in found.names_of(module):
            place = found.layout.places[name]
            digest.update(f"{kinds.get(name, '')}{FLOATING[place.dtype]} {list(place.shape)}\n".encode())
            digest.update(file.data(name).data)
        return digest.digest()

    modules = found.modules
    parts = [modules[first : first + MODULES_AT_ONCE] for first in range(0, len(modules), MODULES_AT_ONCE)]
    jobs = [readers().submit(lambda part: b"".join(map(digest, part)), part) for part in parts]

    def result() -> str:
        changes = [module.encode() + changed.digest for module, changed in rows.items()]
        invocation = f"invocation {found.invocation}".encode() if found.invocation else b""
        return hashlib.sha256(b"".join((*(job.result() for job in jobs), *changes, invocation))).hexdigest()

    return result
