"""The documentation is true: its examples run, its support table is fresh, its links resolve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from csa_dispatch.operations import SPECS
from csa_dispatch.support_table import (
    BEGIN,
    END,
    LABELS,
    columns_of,
    in_tree_backends,
    main,
    support_table,
    with_table,
)

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
RUNNER = ROOT / "scripts" / "run_examples.py"
# The interpreter widens what Triton supports; pages and table speak of real runs.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def run_examples(page: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUNNER), str(page)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_the_page_do_what_it_says(page: Path):
    if page.name == "transformers.md":
        pytest.importorskip("transformers", reason="there is none for this Python")
    done = run_examples(page)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "but it printed\n1"),
        ("```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n", "AssertionError"),
        ("```console\n$ exit 3\n```\n", "exit 3"),
        ("```console\n$ echo a\nb\n```\n", "but it printed\na"),
    ],
)
def test_a_wrong_example_is_caught(tmp_path: Path, page: str, complaint: str):
    path = tmp_path / "page.md"
    path.write_text(page)
    done = run_examples(path)
    assert done.returncode == 1
    assert complaint in done.stdout


def test_an_example_can_be_left_out(tmp_path: Path):
    path = tmp_path / "page.md"
    path.write_text("<!-- not run: needs a GPU -->\n\n```python\n1 / 0\n```\n")
    assert "0 examples" in run_examples(path).stdout


def test_support_table_in_the_readme_is_fresh():
    done = subprocess.run(
        [sys.executable, "-m", "csa_dispatch.support_table", "--check", str(ROOT / "README.md")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_support_table_is_caught_and_rewritten(tmp_path: Path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main(["--check", str(path)]) == 1
    assert main(["--write", str(path)]) == 0
    assert main(["--check", str(path)]) == 0
    assert path.read_text().startswith("before\n")
    assert path.read_text().endswith("\nafter\n")


def test_every_operation_has_its_table_of_those_who_implement_it():
    table = support_table(in_tree_backends())
    for operation in SPECS:
        columns = columns_of(operation, in_tree_backends())
        assert columns
        header = "|  | " + " | ".join(f"`{column.name}`" for column in columns) + " |"
        assert header in table
        assert (operation == "attention") != (f"Of `{operation}`:" in table)
    picks = table.partition("Of `lightning_indexer`:")[2]
    assert "| picks a token | any | 1 to 2048 | any | any |" in picks
    assert "- `cudnn`: On SM90 the indexer has 16, 32 or 64 heads." in picks


def test_every_field_that_a_backend_bounds_has_a_row():
    for operation in SPECS:
        for column in columns_of(operation, in_tree_backends()):
            for side in column.sides:
                assert set(side.bounds()) <= set(LABELS)


def test_a_page_without_markers_is_an_error():
    with pytest.raises(ValueError, match="missing"):
        with_table("no markers", "table")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_environment_variable_is_documented():
    from csa_dispatch.settings import VARIABLES

    text = (ROOT / "docs" / "routing.md").read_text()
    assert [name for name in VARIABLES if name not in text] == []


def test_every_call_spec_field_is_documented():
    from csa_dispatch import CallSpec

    text = (ROOT / "docs" / "routing.md").read_text()
    assert [name for name in CallSpec._fields if f"`{name}`" not in text] == []
