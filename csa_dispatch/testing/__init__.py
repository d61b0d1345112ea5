"""What trust rests on: oracle, error budgets, generated cases, mutants, the conformance kit."""

from .budgets import Target, TensorVerdict, gradient_tensors, judge
from .cases import Case, Inputs, build, to_call
from .check import (
    CellResult,
    Outcome,
    Reference,
    Run,
    attend,
    attention_run,
    backend_run,
    check_case,
    reference_for,
)
from .conformance import check_backend
from .conformance_report import CheckResult, ConformanceError, ConformanceReport
from .covering import Boundary, boundaries_for, cases_for
from .field_case import FieldCase, check_field_case
from .field_cases import field_cases
from .mutants import MUTATIONS, Mutation, PlainBackend, mutants
from .oracle import oracle_forward, oracle_gradients, visible_rows
from .plain import plain_attention, plain_forward, plain_gradients
from .targets import targets

__all__ = [
    "MUTATIONS",
    "Boundary",
    "Case",
    "CellResult",
    "CheckResult",
    "ConformanceError",
    "ConformanceReport",
    "FieldCase",
    "Inputs",
    "Mutation",
    "Outcome",
    "PlainBackend",
    "Reference",
    "Run",
    "Target",
    "TensorVerdict",
    "attend",
    "attention_run",
    "backend_run",
    "boundaries_for",
    "build",
    "cases_for",
    "check_backend",
    "check_case",
    "check_field_case",
    "field_cases",
    "gradient_tensors",
    "judge",
    "mutants",
    "oracle_forward",
    "oracle_gradients",
    "plain_attention",
    "plain_forward",
    "plain_gradients",
    "reference_for",
    "targets",
    "to_call",
    "visible_rows",
]
