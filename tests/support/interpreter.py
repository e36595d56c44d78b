"""Triton's interpreter without the work whose result it throws away, which is more than half of its work.

Nothing of this changes what a kernel computes or which error it raises.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def without_waste() -> Iterator[None]:
    """The interpreter is faster meanwhile. What another release of Triton does not have stays as it is there."""
    with pytest.MonkeyPatch.context() as patched:
        options = getattr(interpreter.interpreter_builder, "options", None)
        if getattr(options, "sanitize_overflow", False) and not options.debug:
            # each sum and product of integers is computed again in 64 bits, for an assertion that is off without debug
            quick = replace(options, sanitize_overflow=False)
            patched.setattr(interpreter.interpreter_builder, "options", quick)
        if hasattr(interpreter, "_LangPatchScope"):
            patched.setattr(interpreter, "_patch_lang", patch_once(interpreter._patch_lang))
        if hasattr(interpreter, "_get_np_dtype"):
            patched.setattr(interpreter, "_get_np_dtype", remembered(interpreter._get_np_dtype))
        for name in {"with_element_ty", "to_ir"} & vars(tl.block_type).keys():
            patched.setattr(tl.block_type, name, known_types(getattr(tl.block_type, name)))
        patched.setattr(tl.tensor, "__init__", known_fields(tl.tensor.__init__))
        yield


def patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A launch puts interpreted functions into `triton.language`, and takes them out at its end. Each call of a device
    function does the first again; one that finds its modules patched by the same launch has nothing to do.
    """
    modules: dict[Any, frozenset[str]] = {}
    patched: set[str] = set()

    def patch_lang(fn: Any) -> Any:
        if fn not in modules:
            seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            modules[fn] = frozenset(module.__name__ for module in seen)
        if patched and modules[fn] <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(modules[fn])
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_lang


def remembered(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The table from Triton's types to numpy's is made at each look-up."""
    known: dict[Any, Any] = {}

    def look_up(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar not in known:
            known[scalar] = np_dtype(scalar)
        return known[scalar]

    return look_up


def known_types(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Types are values; a kernel has few, and makes one or two at each operation. `make`: of a type of blocks, with
    another type of elements or with the interpreter's only builder.
    """
    known: dict[tuple[str, Any], Any] = {}

    def look_up(block: Any, other: Any) -> Any:
        key = block.name, getattr(other, "name", None)
        if key not in known:
            known[key] = make(block, other)
        return known[key]

    return look_up


def known_fields(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Everything in a tensor of the interpreter but its handle follows from its type: shape and size as constants."""
    known: dict[str, dict[str, Any]] = {}

    def make(tensor: Any, handle: Any, type: Any) -> None:
        fields = known.get(type.name)
        if fields is None:
            init(tensor, handle, type)
            known[type.name] = {name: value for name, value in vars(tensor).items() if name != "handle"}
        else:
            vars(tensor).update(fields)
            tensor.handle = handle

    return make
