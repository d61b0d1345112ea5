"""``csa-dispatch bench``: how fast each backend runs the calls of a suite, side by side."""

from .results import BenchRow, BenchRun
from .runner import run_suite
from .suite import BenchCase, Suite, load_suite

__all__ = ["BenchCase", "BenchRow", "BenchRun", "Suite", "load_suite", "run_suite"]
