"""The JUnit XML report: a suite for each backend (or pair), a test case for each cell."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from .files import write_atomically
from .results import CellReport, ParityRun, Status

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters XML 1.0 has no way to write."""


def junit_text(run: ParityRun) -> str:
    """The run as JUnit XML."""
    root = ElementTree.Element("testsuites", name=f"csa-dispatch parity {_clean(run.matrix)}")
    for entry in run.entries:
        reports = [report for report in run.reports if report.cell.entry == entry]
        suite = _suite(root, str(entry), len(reports), sum(r.seconds for r in reports))
        suite.set("failures", str(sum(r.status is Status.FAIL for r in reports)))
        suite.set("skipped", str(sum(_skipped(r) for r in reports)))
        suite.set("timestamp", str(run.environment.get("date", "")))
        for report in reports:
            _test_case(suite, report)
    if run.faults:
        suite = _suite(root, "run", len(run.faults), 0.0)
        suite.set("failures", str(len(run.faults)))
        for fault in run.faults:
            case = ElementTree.SubElement(suite, "testcase", name=_clean(fault))
            ElementTree.SubElement(case, "failure", message=_clean(fault))
    root.set("tests", str(len(run.reports) + len(run.faults)))
    root.set("failures", str(len(run.failures) + len(run.faults)))
    root.set("time", f"{run.seconds:.3f}")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def write_junit(run: ParityRun, path: str | Path) -> None:
    """Write the JUnit report atomically."""
    write_atomically(path, junit_text(run))


def _suite(
    root: ElementTree.Element, name: str, tests: int, seconds: float
) -> ElementTree.Element:
    return ElementTree.SubElement(
        root, "testsuite", name=name, tests=str(tests), errors="0", time=f"{seconds:.3f}"
    )


def _skipped(report: CellReport) -> bool:
    return report.status in (Status.UNSUPPORTED, Status.UNAVAILABLE)


def _test_case(suite: ElementTree.Element, report: CellReport) -> None:
    cell = report.cell
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"{cell.entry}.{cell.group}",
        name=_clean(f"{cell.name}-{cell.layout}"),
        time=f"{report.seconds:.6f}",
    )
    if report.status is Status.FAIL:
        failure = ElementTree.SubElement(case, "failure", message=_clean(report.message))
        failure.text = _clean(
            "\n".join(
                f"{verdict.name}: {verdict.share:.3g} of budget, error {verdict.error:.3g}, "
                f"plain {verdict.plain_error:.3g} {verdict.message}"
                for verdict in report.verdicts
            )
        )
    elif _skipped(report):
        reasons = "; ".join(str(reason) for reason in report.reasons)
        ElementTree.SubElement(
            case, "skipped", message=_clean(f"{report.status.value}: {reasons}")
        )


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)
