"""The Gluon names the Hopper kernels use, under one spelling for Triton 3.6 to 3.9.

Importing this module raises ImportError or AttributeError where Triton has no fitting Gluon;
``hopper.py`` then leaves the call to the portable kernels.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = [
    "aggregate",
    "arrive_when_copied",
    "barrier",
    "commit_group",
    "copy_async",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "wait_group",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# Private until Triton 3.7.
aggregate = getattr(triton, "aggregate", None) or triton.language.core._aggregate
# Triton 3.7 renamed the copy; the old name stayed behind as a stub that raises.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
arrive_when_copied = async_copy.mbarrier_arrive
commit_group = async_copy.commit_group
wait_group = async_copy.wait_group
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
