"""Running: every status, receipts, requirements, boundaries and limits, with real backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch

from csa_dispatch import (
    Availability,
    Backend,
    Between,
    Call,
    Capabilities,
    Gradients,
    Kind,
    OneOf,
    Reason,
    attention,
)
from csa_dispatch.parity import Matrix, ParityRun, Status, run_matrix
from csa_dispatch.parity import runner as runner_module
from csa_dispatch.parity.execute import run_boundary
from csa_dispatch.parity.expand import Selection, expand
from csa_dispatch.parity.matrix import load_matrix, parse_matrix
from csa_dispatch.parity.results import Cell
from csa_dispatch.policy import Entry
from csa_dispatch.testing import Boundary, Case
from csa_dispatch.testing.mutants import MUTATIONS, Mutation, PlainBackend

Register = Callable[[Backend], str]


def boundaries() -> Matrix:
    return parse_matrix({"name": "b", "group": [{"name": "b", "source": "boundaries"}]}, "b.toml")


def only(run: ParityRun, status: Status) -> list:
    return [report for report in run.reports if report.status is status]


def test_eager_passes_with_receipts_of_both_directions(tiny: Matrix):
    run = run_matrix(tiny, backends=["eager"])
    assert run.exit_code == 0
    assert [report.status for report in run.reports] == [Status.PASS] * 3
    both = ("forward eager", "backward eager")
    assert [report.receipts for report in run.reports] == [both, both, ("forward eager",)]
    assert {verdict.name for verdict in run.reports[0].verdicts} == {
        "output", "lse", "dquery", "dlocal_kv", "dsparse_kv", "dsink"
    }  # fmt: skip
    assert all(0 <= (report.share or 0) <= 1 for report in run.reports)
    assert all(report.seconds > 0 for report in run.reports)


class Liar(PlainBackend):
    """Has another backend do its work, through the public call."""

    def forward(self, call: Call):
        return attention(
            call.query,
            call.local_kv,
            call.sparse_kv,
            call.kv_indices,
            call.attention_sink,
            sliding_window_size=call.sliding_window_size,
            cu_seqlens=call.cu_seqlens,
            cu_seqlens_k=call.cu_seqlens_k,
            doc_ids=call.doc_ids,
            compress_ratio=call.compress_ratio,
            scale=call.scale,
            return_lse=True,
            backend="eager",
        )


def test_a_backend_that_lets_another_do_its_work_is_caught_by_receipt(
    tiny: Matrix, register: Register
):
    name = register(Liar(Mutation("liar")))
    run = run_matrix(tiny, backends=[name])
    assert run.exit_code == 1
    for report in run.failures:
        assert "receipts say that forward eager, forward liar" in report.message
        assert all(verdict.passed for verdict in report.verdicts)
    assert len(run.failures) == 3


def test_a_backend_that_raises_fails_its_cells_and_the_run_goes_on(
    tiny: Matrix, register: Register
):
    class Broken(PlainBackend):
        def forward(self, call: Call):
            raise ZeroDivisionError("no such kernel")

    name = register(Broken(Mutation("broken")))
    run = run_matrix(tiny, backends=[name, "eager"])
    by_backend = {
        backend: [r.status for r in run.reports if r.cell.entry.forward == backend]
        for backend in (name, "eager")
    }
    assert by_backend == {name: [Status.FAIL] * 3, "eager": [Status.PASS] * 3}
    message = run.failures[0].message
    assert "ZeroDivisionError: no such kernel" in message
    assert "test_runner.py" in message


def test_a_wrong_gradient_fails_with_the_tensor_named(tiny: Matrix, register: Register):
    def halve(_: Call, gradients: Gradients) -> Gradients:
        return gradients._replace(
            local_kv=None if gradients.local_kv is None else gradients.local_kv / 2
        )

    name = register(PlainBackend(Mutation("half", gradients=halve)))
    run = run_matrix(tiny, backends=[name])
    assert [report.status for report in run.reports] == [Status.FAIL, Status.FAIL, Status.PASS]
    assert "dlocal_kv: Frobenius error" in run.failures[0].message


def test_unsupported_and_unavailable_carry_their_reasons(tiny: Matrix, register: Register):
    class Narrow(PlainBackend):
        forward_capabilities = backward_capabilities = Capabilities(dtype=OneOf(("bfloat16",)))

    class Absent(PlainBackend):
        def probe(self) -> Availability:
            return Availability("", Reason("availability", "not installed", "a GPU", "buy one"))

    narrow, absent = register(Narrow(Mutation("narrow"))), register(Absent(Mutation("absent")))
    run = run_matrix(tiny, backends=[narrow, absent])
    assert run.exit_code == 0
    assert [r.reasons[0].field for r in only(run, Status.UNSUPPORTED)] == ["dtype", "dtype"]
    assert [r.reasons[0].field for r in only(run, Status.UNAVAILABLE)] == ["availability"] * 3
    assert len(only(run, Status.PASS)) == 1

    required = run_matrix(tiny, backends=["eager"], required=[narrow])
    assert required.exit_code == 1
    assert [r.message for r in required.failures] == [
        "required, but unsupported: dtype is float32; needs bfloat16"
    ] * 2
    assert run_matrix(tiny, backends=["eager"], required=[absent]).exit_code == 1
    assert run_matrix(tiny, backends=[narrow], required=["eager"]).exit_code == 0


def test_a_pair_is_required_when_both_its_backends_are(register: Register):
    class Narrow(PlainBackend):
        forward_capabilities = backward_capabilities = Capabilities(dtype=OneOf(("bfloat16",)))

    narrow = register(Narrow(Mutation("narrow")))
    group = {"name": "g", "source": "list", "crossed": True, "cases": [{"tokens": 4}]}
    matrix = parse_matrix({"name": "m", "group": [group]}, "m.toml")
    one = run_matrix(matrix, backends=["eager", narrow], required=["eager"])
    assert [report.status for report in one.reports] == [Status.UNSUPPORTED] * 2
    assert one.faults == ("eager is required, but no cell of this run exercised it",)
    both = run_matrix(matrix, backends=["eager", narrow], required=["eager", narrow])
    assert [report.status for report in both.reports] == [Status.FAIL] * 2


def test_a_required_backend_that_no_cell_exercises_is_a_fault(tiny: Matrix, register: Register):
    data = {
        "name": "m",
        "group": [
            {"name": "g", "source": "list", "backends": ["eager"], "cases": [{"tokens": 4}]}
        ],
    }
    name = register(PlainBackend(Mutation("idle")))
    run = run_matrix(parse_matrix(data, "m.toml"), backends=["eager"], required=[name])
    assert run.exit_code == 1
    assert run.failures == []
    assert run.faults == ("idle is required, but no cell of this run exercised it",)


def test_crossed_groups_run_each_forward_with_the_other_backward(register: Register):
    name = register(PlainBackend(Mutation("plain")))
    data = {
        "name": "m",
        "group": [
            {
                "name": "g",
                "source": "list",
                "crossed": True,
                "cases": [{"tokens": 5, "head_dim": 16}, {"tokens": 5, "needs_grad": ""}],
            }
        ],
    }
    run = run_matrix(parse_matrix(data, "m.toml"), backends=["eager", name])
    assert run.exit_code == 0
    assert [report.receipts for report in run.reports] == [
        ("forward eager", "backward plain"),
        ("forward plain", "backward eager"),
    ]


def test_boundaries_of_every_shipped_backend_are_refused_for_the_right_reason():
    run = run_matrix(boundaries(), backends=["eager", "attention_gym", "triton"])
    assert run.exit_code == 0, [report.message for report in run.failures]
    fields = {
        (report.cell.entry.forward, reason.field)
        for report in run.reports
        for reason in report.reasons
    }
    assert {("attention_gym", "documents"), ("triton", "head_dim"), ("triton", "dtype")} <= fields


def test_a_bound_of_the_backward_alone_is_tried_with_gradients(register: Register):
    class Bounded(PlainBackend):
        backward_capabilities = Capabilities(heads=Between(1, 8))

    name = register(Bounded(Mutation("bounded")))
    run = run_matrix(boundaries(), backends=[name])
    assert [(r.cell.name, r.status) for r in run.reports] == [
        ("heads=0", Status.PASS),
        ("heads=9", Status.PASS),
    ]


def test_a_boundary_that_is_not_refused_fails(register: Register):
    class Narrow(PlainBackend):
        forward_capabilities = backward_capabilities = Capabilities(dtype=OneOf(("bfloat16",)))

    name = register(Narrow(Mutation("narrow")))
    cell = Cell("boundary", "b", "dtype=float32", "BHSD", Entry(name, name))
    outside, inside = Case(tokens=4), Case(tokens=4, dtype="bfloat16")
    right = run_boundary(cell, Boundary("dtype", outside.spec(), outside), "cpu")
    assert right.status is Status.PASS
    other_field = run_boundary(cell, Boundary("heads", outside.spec(), outside), "cpu")
    assert other_field.message == "no Reason of field heads (Reasons: dtype)"
    supported = run_boundary(cell, Boundary("dtype", inside.spec(), None), "cpu")
    assert supported.message == "no Reason of field dtype (Reasons: none)"
    ran = run_boundary(cell, Boundary("dtype", outside.spec(), inside), "cpu")
    assert ran.message == "the call ran; it must be refused"


def test_the_oracle_is_worked_out_once_a_case(tiny: Matrix, monkeypatch, register: Register):
    name = register(PlainBackend(Mutation("plain")))
    real, made = runner_module.reference_for, []

    def counted(case, device):
        made.append(case.name)
        return real(case, device)

    monkeypatch.setattr(runner_module, "reference_for", counted)
    run = run_matrix(tiny, backends=["eager", name])
    assert len(run.reports) == 6
    assert len(made) == 3


def test_a_group_may_be_judged_by_the_chunked_reference(tiny: Matrix, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the oracle was asked for the whole case")

    groups = (replace(tiny.groups[0], reference="chunked", sample_rows=2),)
    monkeypatch.setattr(runner_module, "reference_for", refuse)
    run = run_matrix(replace(tiny, groups=groups), backends=["eager"])
    assert [report.status for report in run.reports] == [Status.PASS] * 3


def test_a_case_whose_reference_fails_fails_alone(tiny: Matrix, monkeypatch):
    real = runner_module.reference_for

    def odd(case, device):
        if case.kind is Kind.WINDOW:
            raise MemoryError("too large")
        return real(case, device)

    monkeypatch.setattr(runner_module, "reference_for", odd)
    run = run_matrix(tiny, backends=["eager"])
    assert [report.status for report in run.reports] == [Status.PASS, Status.FAIL, Status.PASS]
    assert run.failures[0].message == "no reference: MemoryError: too large"


def test_a_lost_device_ends_the_run_and_is_blamed_on_the_cell_that_lost_it(
    tiny: Matrix, register: Register, monkeypatch
):
    class Broken(PlainBackend):
        def forward(self, call: Call):
            raise RuntimeError("an illegal memory access was encountered")

    name = register(Broken(Mutation("broken")))
    monkeypatch.setattr(runner_module, "_device_lost", lambda device: "the context is lost")
    run = run_matrix(tiny, backends=["eager", name])
    assert [report.status for report in run.reports] == [Status.PASS, Status.FAIL]
    assert run.exit_code == 1
    assert run.faults == (
        f"the context is lost in {run.failures[0].cell.id}: the other 4 cells did not run",
    )


def test_limits_leave_large_cells_out_and_say_so(monkeypatch):
    data = {
        "name": "m",
        "limits": {
            "eager": {
                "max_blocks": 8, "heads_a_block": 2, "environment": "SLOW=1", "why": "it is slow"
            }
        },
        "group": [
            {
                "name": "g",
                "source": "list",
                "base": {"head_dim": 16},
                "cases": [{"tokens": 4, "heads": 4}, {"tokens": 4, "heads": 5, "seed": 1}],
            }
        ],
    }  # fmt: skip
    matrix = parse_matrix(data, "m.toml")
    monkeypatch.delenv("SLOW", raising=False)
    assert len(run_matrix(matrix, backends=["eager"]).reports) == 2
    monkeypatch.setenv("SLOW", "1")
    run = run_matrix(matrix, backends=["eager"])
    assert [report.cell.name.split("-")[2][:4] for report in run.reports] == ["B1H4"]
    assert run.notes == ("eager: 1 cells of more than 8 blocks left out (it is slow)",)


def test_field_cases_run_with_receipts():
    data = {"name": "m", "group": [{"name": "f", "source": "field", "dtypes": ["float32"]}]}
    run = run_matrix(parse_matrix(data, "m.toml"), backends=["eager"], text="G01")
    assert [report.status for report in run.reports] == [Status.PASS]
    assert run.reports[0].receipts == ("forward eager", "backward eager")
    assert run.reports[0].cell.about == "validity judged by column, not by value"


def test_parts_are_everything_once():
    matrix = load_matrix("ci.toml")
    chosen = Selection(("eager",), "cpu", text="sink=none")
    whole, _ = expand(matrix, chosen)
    parts = [expand(matrix, replace(chosen, part=(number, 3))) for number in (1, 2, 3)]
    ids = [[cell.id for work in works for cell in work.cells] for works, _ in parts]
    assert all(ids)
    assert sorted(chain(*ids)) == sorted(cell.id for work in whole for cell in work.cells)
    assert [notes[-1].partition(":")[0] for _, notes in parts] == [
        "part 1 of 3",
        "part 2 of 3",
        "part 3 of 3",
    ]


def test_unknown_backends_and_absent_devices_are_usage_errors(tiny: Matrix):
    with pytest.raises(ValueError, match=r"--backend is 'egaer'.*Did you mean 'eager'"):
        run_matrix(tiny, backends=["egaer"])
    with pytest.raises(ValueError, match="--require is 'x'"):
        run_matrix(tiny, required=["x"])
    with pytest.raises(ValueError, match="no cell to run"):
        run_matrix(tiny, backends=["eager"], text="nothing like it")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cpu"):
            run_matrix(tiny, backends=["eager"], device="cuda")


MESSY = {
    "name": "messy",
    "group": [
        {
            "name": "messy",
            "source": "list",
            "base": {
                "tokens": 13, "pool": 9, "slots": 8, "window": 3, "heads": 66, "kv_heads": 2,
                "head_dim": 80, "batch": 2, "scale": 0.3, "compress_ratio": 2, "content": "messy",
            },
            "cases": [
                {"documents": "cu_seqlens"},
                {"documents": "none", "dtype": "bfloat16", "content": "scattered"},
                {"documents": "none", "content": "duplicates", "pool": 40},
                {"kind": "dense-compressed"},
                {"kind": "window", "documents": "doc_ids"},
            ],
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutant_turns_a_run_red(mutation: Mutation, register: Register):
    name = register(PlainBackend(mutation))
    assert run_matrix(parse_matrix(MESSY, "messy.toml"), backends=[name]).failures


def test_the_unmutated_operation_keeps_that_run_green(register: Register):
    name = register(PlainBackend(Mutation("plain")))
    run = run_matrix(parse_matrix(MESSY, "messy.toml"), backends=[name, "eager"])
    assert run.exit_code == 0, [report.message for report in run.failures]
