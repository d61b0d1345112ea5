"""The wheel holds what a user needs and nothing else; the metadata says what is true."""

from __future__ import annotations

import os
import subprocess
import sys
from email.parser import HeaderParser
from importlib import import_module, metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

import csa_dispatch
from csa_dispatch.backend import ENTRY_POINT_GROUP

ROOT = Path(__file__).parents[2]
SOURCES = {
    "csa_dispatch": ROOT / "csa_dispatch",
    "csa_dispatch_configs": ROOT / "configs",
    **{path.name: path for path in (ROOT / "backends").glob("csa_backend_*")},
}
EXTRAS = {"triton", "attention-gym", "fa4", "cudnn", "all", "dev", "docs"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tracked and new files of the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def names_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_module_of_every_package(wheel: Path):
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in SOURCES.items()
        for path in folder.rglob("*.py")
    }
    assert expected - names_in(wheel) == set()


def test_wheel_holds_type_marker_configs_and_templates(wheel: Path):
    names = names_in(wheel)
    assert "csa_dispatch/py.typed" in names
    configs = {
        f"csa_dispatch_configs/{path.relative_to(ROOT / 'configs').as_posix()}"
        for path in (ROOT / "configs").rglob("*.toml")
    }
    assert "csa_dispatch_configs/policy/default.toml" in configs
    assert configs - names == set()
    data = {
        f"csa_dispatch/{path.relative_to(ROOT / 'csa_dispatch').as_posix()}"
        for path in (ROOT / "csa_dispatch").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert data - names == set()


def test_wheel_holds_nothing_else(wheel: Path):
    tops = {name.split("/")[0] for name in names_in(wheel)}
    assert tops == set(SOURCES) | {f"csa_dispatch-{csa_dispatch.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names_in(wheel))


def test_wheel_metadata_matches_the_package(wheel: Path):
    with ZipFile(wheel) as archive:
        (name,) = [item for item in archive.namelist() if item.endswith(".dist-info/METADATA")]
        headers = HeaderParser().parsestr(archive.read(name).decode())
    assert headers["Version"] == csa_dispatch.__version__
    assert headers["Requires-Python"] == ">=3.10"
    assert set(headers.get_all("Provides-Extra", [])) >= EXTRAS


def test_installed_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path):
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import csa_dispatch\n"
        "print(csa_dispatch.__file__)\n"
        "print(csa_dispatch.explain(csa_dispatch.CallSpec(), device='cpu').policy)\n"
        "print(*(row.origin for row in csa_dispatch.backends().values() if row.backend))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, policy, origins = done.stdout.splitlines()
    assert file.startswith(str(tmp_path))
    assert policy == "default"
    assert "csa_backend_eager:backend" in origins


def test_every_in_tree_backend_is_an_entry_point_that_loads():
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    modules = {point.value.partition(":")[0] for point in points.values()}
    assert {name for name in SOURCES if name.startswith("csa_backend_")} <= modules
    for name, row in csa_dispatch.backends().items():
        if row.origin.startswith("csa_backend_"):
            assert isinstance(row.backend, csa_dispatch.Backend), (name, row.availability)


def test_console_script_is_installed():
    (point,) = [
        item
        for item in metadata.entry_points(group="console_scripts")
        if item.name == "csa-dispatch"
    ]
    module, _, attribute = point.value.partition(":")
    assert callable(getattr(import_module(module), attribute))
