"""The parity runner: do all backends agree with the oracle, in outputs and gradients?"""

from csa_dispatch.toml_table import MatrixError

from .matrix import Matrix, load_matrix
from .results import CellReport, ParityRun, Status
from .runner import run_matrix

__all__ = [
    "CellReport",
    "Matrix",
    "MatrixError",
    "ParityRun",
    "Status",
    "load_matrix",
    "run_matrix",
]
