# pyright: reportGeneralTypeIssues=false
"""The last step of the Hopper window-only dKV: the runs' sums added up, in order.

One program owns ROWS rows of ``local_kv``. ``hopper_window_key_gradient`` wrote SUMS fp32
``[runs, splits, RUN + WINDOW, D]``, a run's row 0 being the key WINDOW before its first token:

    GRAD[key] = sum over the runs that see it and their splits
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "lowest", "end", "first_run", "splits"])
def window_key_sums_kernel(
    SUMS,
    GRAD,
    grad_b,
    grad_t,
    tokens,
    lowest,
    end,
    first_run,
    splits,
    WINDOW: tl.constexpr,
    RUN: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """For the keys ``lowest .. end - 1``, counted as tokens of whole runs.

    SUMS begins with run ``first_run``, which may be one of none.
    """
    key = lowest + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own_run = key // RUN
    batch_runs = (tokens + RUN - 1) // RUN
    b = own_run // batch_runs
    t = key - b * batch_runs * RUN
    live = (key < end) & (t < tokens)
    column = tl.arange(0, D)[None, :]
    total = tl.zeros([ROWS, D], tl.float32)
    for n in tl.static_range(WINDOW // RUN + 1):
        row = key % RUN + WINDOW - n * RUN
        used = (live & (own_run + n < (b + 1) * batch_runs))[:, None]
        for split in range(splits):
            place = ((own_run + n - first_run) * splits + split).to(tl.int64) * (RUN + WINDOW)
            total += tl.load(SUMS + ((place + row) * D)[:, None] + column, used, 0.0)
    place = GRAD + (b.to(tl.int64) * grad_b + t.to(tl.int64) * grad_t)[:, None] + column
    tl.store(place, total.to(GRAD.dtype.element_ty), live[:, None])
