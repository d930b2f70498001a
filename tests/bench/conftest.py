"""Stages of the GPU check on a dry run."""

from __future__ import annotations

import json

import pytest

from fasteagle.bench.gpu_check import stage


@pytest.fixture
def dry(tmp_path):
    """Runs a stage in this process on a dry run: exit code, and what it found."""

    def run(name):
        results = tmp_path / "results.json"
        arguments = [name, "--results", str(results), "--out", str(tmp_path), "--dry-run"]
        code = stage.main(arguments)
        return code, json.loads(results.read_text())

    return run
