"""The package as others get it: the wheel, the two symlinks, the banned names."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("fasteagle", "compile", "quant", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that the checkout stays clean."""
    base = tmp_path_factory.mktemp("build")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, base / part, symlinks=True)
        else:
            shutil.copy(source, base / part)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            base / "out",
            base,
        ],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return next((base / "out").glob("*.whl"))


def test_wheel_holds_every_module_once(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    modules = [path.relative_to(ROOT) for path in (ROOT / "fasteagle").rglob("*.py")]
    for package in ("compile", "quant"):  # behind symlinks, which rglob may follow or not
        for path in (ROOT / package).rglob("*.py"):
            modules.append("fasteagle" / path.relative_to(ROOT))
    assert len(set(modules)) > 60
    assert {str(module) for module in modules} <= set(names)
    others = {"py.typed", "data/prompts.jsonl", "server/page.html"}
    assert {f"fasteagle/{name}" for name in others} <= set(names)
    assert not any(name.startswith(("compile/", "quant/", "tests/")) for name in names)


def test_wheel_imports_on_its_own(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import fasteagle.compile, fasteagle.quant.scheme, sys\n"
        "import fasteagle.cli.main, fasteagle.bench.run\n"
        "print(fasteagle.compile.__file__); print(fasteagle.quant.__file__); "
        "print('compile' in sys.modules, 'quant' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(str(site)) and lines[1].startswith(str(site))
    assert lines[2] == "False False"


def test_symlinks_are_relative_and_point_to_the_packages():
    for name in ("compile", "quant"):
        link = ROOT / "fasteagle" / name
        assert link.is_symlink() and str(link.readlink()) == f"../{name}"


@pytest.mark.parametrize(
    "line",
    [
        "import quant",
        "from quant.scheme import BF16",
        "import compile",
        "from compile import inductor",
    ],
)
def test_ruff_bans_the_bare_names(tmp_path, line):
    path = tmp_path / "x.py"
    path.write_text(line + "\n")
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        str(ROOT / "pyproject.toml"),
        "--select",
        "TID251",
        "--no-cache",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "TID251" in done.stdout


def test_ci_runs_the_commands_of_the_readme():
    """`.ci/run` and the first screen of the README name the same two commands."""
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"```sh\n(.*?)```", readme, re.S)
    commands = [part for line in block[1].splitlines() for part in line.split(" && ")]
    assert commands[-1] == "pytest"
    ci = (ROOT / ".ci" / "run").read_text()
    assert 'pip install -e ".[dev]"' in commands
    for command in ('pip install -e ".[dev]"', "fasteagle chat", "pytest"):
        assert any(command in line and not line.startswith("#") for line in ci.splitlines()), (
            command
        )
