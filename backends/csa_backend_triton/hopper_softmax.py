# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""Online softmax over blocks of 64 keys, with a lazy maximum, on wgmma's accumulator layout.

Scores are in log2 units. The running maximum moves only when a block exceeds it by 2^8, so that
most blocks leave the output unscaled; P then reaches 2^8, which fp32 sums and bf16/fp16 P hold
easily. Row sums are kept as 8 partial sums a row, so that no lane waits for another until an
item's end.
"""

from .gluon_compat import gl, gluon

HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
LAZY_LOG2 = gl.constexpr(8.0)
LOWEST = gl.constexpr(-3.4e38)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


@gluon.jit
def load_sink(SINK, head, live):
    """The sink of each head, -inf where there is none."""
    if SINK is None:
        sink = gl.full([HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    else:
        sink = gl.load(SINK + head, mask=live, other=0.0).to(gl.float32)
    return sink


@gluon.jit
def weights(s, bias, m, scale_log2):
    """P of a block, the factor for what was summed before it, and the new maximum.

    ``bias`` is 0 for used keys and -inf for others.
    """
    s = s * scale_log2 + bias[None, :]
    top = gl.max(gl.max(s.reshape([HEADS, KEYS // 8, 8]), 1), 1)
    top = gl.convert_layout(top, gl.SliceLayout(1, SCORES))
    m_new = gl.where(top > m + LAZY_LOG2, top, m)
    p = gl.exp2(s - m_new[:, None])
    return p, gl.exp2(m - m_new), m_new


@gluon.jit
def add_mass(mass, p, alpha):
    """The partial row sums ``[64, 8]`` after a block."""
    sums = gl.convert_layout(gl.sum(p.reshape([HEADS, KEYS // 8, 8]), 1), SUMS)
    return mass * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None] + sums


@gluon.jit
def with_sink(m, mass, sink, empty):
    """Maximum and row sums with the sink, relative to the larger of both, and O's factor.

    A factor of exactly 0 marks a row without keys; its O may be NaN from a NaN query and is not
    to be used.
    """
    total = gl.convert_layout(gl.sum(mass, 1), gl.SliceLayout(1, SCORES))
    total = gl.where(empty, 0.0, total)
    m = gl.where(empty, LOWEST, m)
    m_end = gl.maximum(m, sink * LOG2E)
    sink_dominates = m_end > m
    share = gl.exp2(m - m_end)
    total = total * share + gl.where(sink_dominates, 1.0, gl.exp2(sink * LOG2E - m))
    return m, total, gl.where(empty, 0.0, share / total)


@gluon.jit
def log_sum(m, total, sink, empty):
    """lse of what ``with_sink`` returned."""
    # In natural units from the start, so that a dominating sink comes back unrounded.
    sink_dominates = gl.maximum(m, sink * LOG2E) > m
    lse = gl.where(sink_dominates, sink, m * LN2) + gl.log2(total) * LN2
    return gl.where(empty, sink, lse)
