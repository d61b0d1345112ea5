"""Reports: JSON with a fixed shape, JUnit that parses, HTML that needs nothing from outside."""

from __future__ import annotations

import io
import json
import math
import os
import stat
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from rich.console import Console

from csa_dispatch import Reason
from csa_dispatch.parity import CellReport, ParityRun, Status
from csa_dispatch.parity.console import progress, render, share_text
from csa_dispatch.parity.files import check_writable, write_atomically
from csa_dispatch.parity.report_html import html_text, write_html
from csa_dispatch.parity.report_json import SCHEMA, json_text, write_json
from csa_dispatch.parity.report_junit import junit_text, write_junit
from csa_dispatch.parity.results import Cell
from csa_dispatch.policy import Entry
from csa_dispatch.testing import TensorVerdict

ONE, PAIR = Entry("eager", "eager"), Entry("eager", "<b>evil</b>")
REASON = Reason("dtype", "float64", "bfloat16", "use eager")


def cell(name: str, entry: Entry = ONE, kind: str = "case") -> Cell:
    return Cell(kind, "g", name, "BHSD", entry, "about & <about>")


def verdict(name: str, share: float, message: str = "") -> TensorVerdict:
    return TensorVerdict(name, share, share / 100, 0.01, message)


@pytest.fixture
def run() -> ParityRun:
    """A run with every status, an infinite share, and text that must be escaped."""
    return ParityRun(
        matrix="m",
        path="m.toml",
        summary="summary",
        device="cpu",
        backends=("eager",),
        required=("eager",),
        reports=(
            CellReport(
                cell("fine"),
                Status.PASS,
                (verdict("output", 0.34), verdict("lse", 0.02)),
                receipts=("forward eager",),
                seconds=0.5,
            ),
            CellReport(
                cell("wrong"),
                Status.FAIL,
                (verdict("output", math.inf, "shape"),),
                message="output: <script>alert(1)</script> \x1b[31m & more",
                seconds=0.25,
            ),
            CellReport(cell("narrow"), Status.UNSUPPORTED, reasons=(REASON,)),
            CellReport(cell("absent", PAIR), Status.UNAVAILABLE, reasons=(REASON,)),
            CellReport(cell("heads=9", kind="boundary"), Status.PASS, reasons=(REASON,)),
        ),
        groups={"g": "a group"},
        notes=("something was left out",),
        faults=("triton is required, but no cell of this run exercised it",),
        environment={"python": "3.11", "backends": {"eager": "built in"}, "date": "2026-01-01"},
        seconds=1.5,
    )


CELL_SHAPE = {
    "id": str, "kind": str, "group": str, "name": str, "about": str, "layout": str,
    "forward": str, "backward": str, "status": str, "share": (float, type(None)),
    "seconds": float, "receipts": list, "message": str, "reasons": list, "tensors": dict,
}  # fmt: skip
RUN_SHAPE = {
    "schema": str, "matrix": dict, "device": str, "backends": list, "required": list,
    "environment": dict, "seconds": float, "exit_code": int, "counts": dict, "groups": dict,
    "notes": list, "faults": list, "summaries": list, "cells": list,
}  # fmt: skip


def assert_shape(data: dict, shape: dict) -> None:
    assert list(data) == list(shape)
    for key, wanted in shape.items():
        assert isinstance(data[key], wanted), key


def test_json_has_the_shape_its_schema_names(run: ParityRun):
    data = json.loads(json_text(run), parse_constant=lambda name: pytest.fail(name))
    assert data["schema"] == SCHEMA == "csa-dispatch.parity/1"
    assert_shape(data, RUN_SHAPE)
    for item in data["cells"]:
        assert_shape(item, CELL_SHAPE)
    assert data["exit_code"] == 1
    assert data["counts"] == {"pass": 2, "fail": 1, "unsupported": 1, "unavailable": 1}
    fine, wrong, narrow, *_ = data["cells"]
    assert fine["tensors"]["output"] == {
        "share": 0.34,
        "error": pytest.approx(0.0034),
        "plain_error": 0.01,
        "message": "",
    }
    assert (fine["share"], wrong["share"], narrow["share"]) == (0.34, None, None)
    assert narrow["reasons"] == [REASON._asdict()]
    first = data["summaries"][0]
    assert first["entry"] == "eager"
    assert first["worst"]["output"] == {"share": None, "cell": "eager/g/BHSD/wrong"}
    assert first["slowest"] == {"cell": "eager/g/BHSD/fine", "seconds": 0.5}


def test_junit_parses_and_counts_what_ran(run: ParityRun):
    root = ElementTree.fromstring(junit_text(run))
    assert (root.tag, root.get("tests"), root.get("failures")) == ("testsuites", "6", "2")
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == ["eager", "eager+<b>evil</b>", "run"]
    for suite in root:
        cases = suite.findall("testcase")
        assert suite.get("tests") == str(len(cases))
        assert suite.get("failures", "0") == str(len(suite.findall("testcase/failure")))
        assert suite.get("skipped", "0") == str(len(suite.findall("testcase/skipped")))
    failure = suites["eager"].find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "output: <script>alert(1)</script> ?[31m & more"
    skipped = suites["eager"].find("testcase/skipped")
    assert skipped is not None
    assert "dtype is float64; needs bfloat16" in str(skipped.get("message"))


class Page(HTMLParser):
    """Collects what a page would load, its ids and links, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "data", "poster", "srcset") or (tag == "link" and name == "href"):
                self.loads.append(str(value))
            if name == "id":
                self.ids.append(str(value))
            if name == "href":
                self.links.append(str(value))
            if name == "title":
                self.titles.append(str(value))

    def handle_data(self, data: str) -> None:
        self.text += data


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    return page


def test_html_loads_nothing_and_links_only_within_itself(run: ParityRun):
    html = html_text(run)
    page = parse(html)
    assert page.loads == []
    assert "@import" not in html
    assert "url(" not in html
    assert "http" not in html
    assert len(page.ids) == len(set(page.ids))
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_html_escapes_what_backends_say(run: ParityRun):
    html = html_text(run)
    assert "<script>alert" not in html
    assert "<b>evil" not in html
    assert parse(html).tags.count("script") == 1


def test_html_says_every_share_status_reason_and_fault_as_text(run: ParityRun):
    page = parse(html_text(run))
    text = " ".join(page.text.split())
    for wanted in (
        "34%", "✕ failed", "dtype is float64; needs bfloat16; use eager",
        "no cell of this run exercised it", "something was left out", "<script>alert(1)</script>",
        "2 pass, 1 fail, 1 unsupported, 1 unavailable", "75% to 100%",
    ):  # fmt: skip
        assert wanted in text
    assert any("fine, BHSD: 34% of the budget (output)" in title for title in page.titles)
    assert any("narrow, BHSD: unsupported, dtype is float64" in title for title in page.titles)


def test_html_is_made_for_light_and_dark(run: ParityRun):
    html = html_text(run)
    assert '<meta name="color-scheme" content="light dark">' in html
    light, dark = html.split("@media (prefers-color-scheme: dark)")
    names = {
        line.split(":")[0]
        for line in light.split(":root {")[1].replace(";", "\n").split()
        if line.startswith("--")
    }
    assert names
    assert all(f"{name}:" in dark for name in names)


def test_a_green_run_says_so(run: ParityRun):
    green = replace(run, reports=run.reports[:1], faults=())
    assert green.exit_code == 0
    assert "✓ holds" in html_text(green)
    assert json.loads(json_text(green))["exit_code"] == 0


def shown(run: ParityRun, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(render(run))
    return console.file.getvalue()  # pyright: ignore


def test_the_terminal_shows_counts_worst_shares_and_failures(run: ParityRun):
    wide, narrow = shown(run, 140), shown(run, 80)
    for text in (wide, narrow):
        assert "parity failed: 2 pass, 1 fail, 1 unsupported, 1 unavailable in 2 s" in text
        assert "FAIL eager/g/BHSD/wrong" in text
        assert "wrong" in text
        assert "500 ms" in text
        assert all(len(line) <= 140 for line in text.splitlines())
    assert "dsparse_kv" in wide
    assert "wrong output" in narrow
    assert all(len(line) <= 80 for line in narrow.splitlines())


def test_progress_counts_cells_and_failures(run: ParityRun):
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    with progress(console, "parity m") as listener:
        for done, report in enumerate(run.reports, 1):
            listener(report, done, len(run.reports))
    text = console.file.getvalue()  # pyright: ignore
    assert "parity m" in text
    assert "5/5" in text
    assert "1 failed" in text


def test_shares_read_naturally():
    texts = [share_text(share) for share in (0.004, 0.34, 1.5, 39.8, math.inf, math.nan)]
    assert texts == ["0%", "34%", "150%", "39.8x", "wrong", "wrong"]


@pytest.mark.parametrize("write", [write_json, write_junit, write_html])
def test_reports_are_written_whole_with_usual_permissions(run: ParityRun, write, tmp_path):
    place = tmp_path / "new" / "report"
    write(run, place)
    first = place.read_text(encoding="utf-8")
    assert first.rstrip().endswith(("}", ">"))
    write(run, place)
    assert os.listdir(place.parent) == ["report"]
    assert stat.S_IMODE(place.stat().st_mode) & 0o400


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    place = tmp_path / "report"
    write_atomically(place, "old")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(place, "new")
    assert place.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["report"]


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path):
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(real)
    check_writable(str(link))
    write_atomically(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "piped")
    assert os.read(reader, 10) == b"piped"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_place_that_cannot_be_written_to_is_found_beforehand(tmp_path):
    check_writable(None, str(tmp_path / "new" / "report.json"))
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    for bad in (str(tmp_path), str(tmp_path / "file" / "report.json")):
        with pytest.raises(OSError, match=str(tmp_path)):
            check_writable(bad)
