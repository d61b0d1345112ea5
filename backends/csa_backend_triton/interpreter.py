"""Repairs of Triton's CPU interpreter, installed when the backend runs interpreted.

Triton 3.6 to 3.9 interpret bf16 as its 16-bit pattern held in an unsigned integer, so any
arithmetic on it is integer arithmetic, silently wrong. Here every operation that touches bf16
computes in fp32 and rounds to nearest even, as a GPU does. The interpreter also re-patches
``triton.language`` on every nested device-function call, milliseconds each; once a launch and
module is enough.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np


def is_interpreted() -> bool:
    """Whether Triton was told to interpret (the variable counts when kernels are defined)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def widen(pattern: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bit patterns (uint16)."""
    return (np.asarray(pattern).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) of fp32 values, round to nearest even, NaN kept quiet."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    high = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), high | np.uint32(0x40), rounded).astype(np.uint16)


def install() -> None:
    """Repair the interpreter of this process; a second call changes nothing."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "csa_bf16_repaired", False):
        return
    builder.csa_bf16_repaired = True  # pyright: ignore[reportAttributeAccessIssue]
    handle = interpreter.TensorHandle

    def is_bf16(item: Any) -> bool:
        return isinstance(item, handle) and item.dtype.scalar == tl.bfloat16

    def widened(item: Any) -> Any:
        return handle(widen(item.data), tl.float32) if is_bf16(item) else item

    def narrowed(item: Any) -> Any:
        return handle(narrow(item.data), tl.bfloat16)

    def repair_operation(name: str) -> None:
        original = getattr(builder, name)

        @functools.wraps(original)
        def operation(self: Any, *arguments: Any) -> Any:
            if not any(is_bf16(item) for item in arguments):
                return original(self, *arguments)
            result = original(self, *[widened(item) for item in arguments])
            if result.data.dtype == np.bool_:
                return handle(result.data, tl.int1)
            return narrowed(result)

        setattr(builder, name, operation)

    for name in ("unary_op", "binary_op", "ternary_op"):
        repair_operation(name)

    original_dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        result = original_dot(self, widened(a), widened(b), widened(acc), *options)
        return narrowed(result) if is_bf16(acc) else result

    builder.create_dot = create_dot  # pyright: ignore[reportAttributeAccessIssue]

    original_cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == target.scalar:
            return original_cast(self, source, target)
        if is_bf16(source):
            wide = widened(source)
            return wide if target.scalar == tl.float32 else original_cast(self, wide, target)
        if target.scalar == tl.bfloat16:
            if source.dtype.scalar != tl.float32:
                source = original_cast(self, source, tl.float32)
            return narrowed(source)
        return original_cast(self, source, target)

    builder.cast_impl = cast_impl  # pyright: ignore[reportAttributeAccessIssue]

    def repair_reduction(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def like(tensor: Any, data: np.ndarray, scalar: Any) -> Any:
            shape = list(tensor.shape)
            kind = tl.block_type(scalar, shape) if tensor.type.is_block() else scalar
            return tl.core.tensor(handle(data, scalar), kind)

        @functools.wraps(original)
        def reduction(self: Any, tensor: Any) -> Any:
            if tensor.dtype.scalar != tl.bfloat16:
                return original(self, tensor)
            result = original(self, like(tensor, widen(tensor.handle.data), tl.float32))
            single = result[0] if isinstance(result, list) else result
            single = like(single, narrow(single.handle.data), tl.bfloat16)
            return [single] if isinstance(result, list) else single

        setattr(owner, name, reduction)

    def repair_mask(name: str, position: int) -> None:
        original = getattr(builder, name)

        @functools.wraps(original)
        def access(self: Any, *arguments: Any) -> Any:
            mask = arguments[position]
            if mask.data.dtype != np.bool_:
                boolean = handle(mask.data.astype(np.bool_), tl.int1)
                arguments = (*arguments[:position], boolean, *arguments[position + 1 :])
            return original(self, *arguments)

        setattr(builder, name, access)

    # A boolean scalar of the launch's arguments is held as an integer, and so is what it is
    # combined with; Triton 3.9 no longer takes that for a mask.
    repair_mask("create_masked_load", 1)
    repair_mask("create_masked_store", 2)
    repair_reduction(interpreter.ReduceOps, "sum")
    repair_reduction(interpreter.ScanOps, "cumsum")
    _patch_language_once(interpreter)


def _patch_language_once(interpreter: Any) -> None:
    patched: set[int] = set()
    original_grid = interpreter.GridExecutor.__call__

    @functools.wraps(original_grid)
    def run_grid(self: Any, *arguments: Any, **keywords: Any) -> Any:
        patched.clear()
        return original_grid(self, *arguments, **keywords)

    def call_function(self: Any, *arguments: Any, **keywords: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        try:
            return self.rewrite()(*arguments, **keywords)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = run_grid
    interpreter.InterpretedFunction.__call__ = call_function
