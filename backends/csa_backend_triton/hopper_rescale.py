# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""Scaling a wgmma accumulator's rows, skipped where no row changes.

Gluon has no warp-wide branch of its own, so this is inline assembly.
"""

from .gluon_compat import gl, gluon

ELEMENTS = 64
"""Accumulators a thread holds of a ``[64, 128]`` tile."""


def _assembly(elements: int) -> tuple[str, str]:
    """acc *= alpha for one thread's accumulators, and the operands' constraints.

    They alternate in pairs between two rows, so elements 0 and 2 of alpha are all there is. A
    warp skips the multiplications when alpha is 1 in all of its rows.
    """
    first, second = 2 * elements, 2 * elements + 2
    lines = [
        "{ .reg .pred moved;",
        f"setp.neu.f32 moved, ${first}, 0f3F800000;",
        f"setp.neu.or.f32 moved, ${second}, 0f3F800000, moved;",
        "vote.sync.any.pred moved, moved, 0xffffffff;",
        "@!moved bra.uni same;",
        *(f"mul.f32 ${i}, ${i}, ${2 * elements + i};" for i in range(elements)),
        "same: }",
    ]
    constraints = ["=f"] * elements + [str(i) for i in range(elements)] + ["f"] * elements
    return " ".join(lines), ",".join(constraints)


RESCALE, CONSTRAINTS = (gl.constexpr(text) for text in _assembly(ELEMENTS))


@gluon.jit
def rescaled(acc, alpha):
    """``acc * alpha[:, None]`` for a ``[64, 128]`` accumulator."""
    return gl.inline_asm_elementwise(
        RESCALE,
        CONSTRAINTS,
        [acc, gl.expand_dims(alpha, 1)],
        dtype=gl.float32,
        is_pure=False,
        pack=64,
    )
