# pyright: reportGeneralTypeIssues=false
"""The last step of the Hopper window-only dKV: the runs' sums added up, in order.

One program owns ROWS rows of ``local_kv``. ``hopper_window_key_gradient`` wrote SUMS fp32
``[runs, 128 + run_tokens, D]``, run n's row 0 being key first_n - 128:

    GRAD[key] = CARRY[key] + sum over the runs n that see it of SUMS[n, key - first_n + 128]

A chunk of tokens leaves its last 128 keys unfinished: they are carried to the next, as the rows
``key - (chunk_end - 128)`` of ``[128, D]``.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "tokens", "lowest", "chunk_first", "chunk_end"])
def window_key_sums_kernel(
    SUMS,
    CARRY_IN,
    CARRY_OUT,
    GRAD,
    grad_b,
    grad_t,
    rows,
    tokens,
    lowest,
    chunk_first,
    chunk_end,
    run_tokens,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    key = lowest + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = key < chunk_end
    column = tl.arange(0, D)[None, :]
    carried = ((key - chunk_first + WINDOW) * D)[:, None] + column
    total = tl.load(CARRY_IN + carried, (live & (key < chunk_first))[:, None], 0.0)
    first = tl.maximum(key - chunk_first, 0) // run_tokens
    last = (tl.minimum(key + WINDOW, chunk_end) - 1 - chunk_first) // run_tokens
    for n in range((WINDOW - 1) // run_tokens + 2):
        run = first + n
        place = run.to(tl.int64) * WINDOW + key - chunk_first + WINDOW
        sums = SUMS + (place * D)[:, None] + column
        total += tl.load(sums, (live & (run <= last))[:, None], 0.0)
    finished = (key + WINDOW <= chunk_end) | (chunk_end == rows)
    wide = key.to(tl.int64)
    place = GRAD + (wide // tokens * grad_b + wide % tokens * grad_t)[:, None] + column
    tl.store(place, total.to(GRAD.dtype.element_ty), (live & finished)[:, None])
    carried = ((key - chunk_end + WINDOW) * D)[:, None] + column
    tl.store(CARRY_OUT + carried, total, (live & (finished == 0))[:, None])
