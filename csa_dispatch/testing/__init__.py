"""What trust rests on: the float64 oracle, error budgets, generated cases and mutants."""

from .budgets import TensorVerdict, gradient_tensors, judge, targets
from .cases import Case, Inputs, build, to_call
from .covering import Boundary, boundaries_for, cases_for
from .oracle import oracle_forward, oracle_gradients, visible_rows
from .plain import plain_attention, plain_forward, plain_gradients

__all__ = [
    "Boundary",
    "Case",
    "Inputs",
    "TensorVerdict",
    "boundaries_for",
    "build",
    "cases_for",
    "gradient_tensors",
    "judge",
    "oracle_forward",
    "oracle_gradients",
    "plain_attention",
    "plain_forward",
    "plain_gradients",
    "targets",
    "to_call",
    "visible_rows",
]
