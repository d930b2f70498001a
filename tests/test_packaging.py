"""The package as others get it: the wheel and the two symlinks."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers import SCRIPTS, invoke, output_of

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
    out = base / "out"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out]
    command = [sys.executable, "-m", "pip", "wheel", *options, base]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return next(out.glob("*.whl"))


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
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import fasteagle.compile, fasteagle.quant, fasteagle.cli.main, fasteagle.bench.run\n"
        "import fasteagle.server.app\n"
        "assert fasteagle.server.app.PAGE.exists()\n"
        "assert not {'compile', 'quant'} & set(sys.modules)\n"
        "ours = [m for name, m in sys.modules.items() if name.split('.')[0] == 'fasteagle']\n"
        f"assert all(m.__file__.startswith({str(site)!r}) for m in ours)"
    )
    output_of(code, cwd=tmp_path, timeout=120)


def test_symlinks_are_relative_and_point_to_the_packages():
    for name in ("compile", "quant"):
        link = ROOT / "fasteagle" / name
        assert link.is_symlink() and str(link.readlink()) == f"../{name}"


@pytest.mark.parametrize(
    "script",
    sorted(path.stem for path in SCRIPTS.glob("*.py") if "def main(" in path.read_text("utf-8")),
)
def test_every_script_says_what_it_takes(script):
    done = invoke("--help", main=importlib.import_module(script).main)
    assert done.exit_code == 0 and "--help" in done.output, done.output
    examples = [line for line in done.output.splitlines() if "python scripts/" in line]
    assert all(line.lstrip().startswith(("python ", "FASTEAGLE_")) for line in examples), examples
