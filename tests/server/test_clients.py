"""The OpenAPI document, and a fuzzer over it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import httpx
import pytest

from helpers import invoke


def test_wrong_parameters_are_a_400_in_the_document_too(live):
    document = httpx.get(f"{live.url}/openapi.json").json()
    assert len(document["paths"]) == 8
    answers = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(answers) == {"200", "400", "404", "429", "503", "504"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("schemathesis") is None, reason="no schemathesis")
def test_no_request_of_a_fuzzer_is_a_500(live, tmp_path):
    command = [shutil.which("schemathesis"), "run", f"{live.url}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--max-examples", "60", "--seed", "1"]
    command += ["--request-timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_the_command_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in ("fasteagle.cli.serve", "fasteagle.server.app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    done = invoke("serve")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1 and "pip install 'fasteagle[serve]'" in done.stderr
