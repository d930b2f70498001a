"""Clients as people have them: curl, the `llm` command, and a fuzzer over the OpenAPI document."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import httpx
import pytest

CHAT = "/v1/chat/completions"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_curl(live):
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5})
    json_type = ("-H", "Content-Type: application/json")
    done = subprocess.run(
        ["curl", "-s", live.url + CHAT, *json_type, "-d", body], capture_output=True, text=True
    )
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 5
    streamed = body[:-1] + ', "stream": true}'
    done = subprocess.run(
        ["curl", "-sN", live.url + CHAT, *json_type, "-d", streamed], capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


@pytest.mark.skipif(shutil.which("llm") is None, reason="no llm (pip install llm)")
def test_the_llm_command(live, tmp_path):
    """With the settings that its documentation names for OpenAI-compatible servers."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {live.server.name}\n  api_base: {live.url}/v1\n"
        "  api_key_name: none\n  can_stream: true\n  supports_schema: true\n"
    )
    (tmp_path / "keys.json").write_text('{"none": "x"}')
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}

    def llm(*arguments):
        command = ["llm", "-m", "here", "--no-log", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    expected = live.llm.chat("hello", max_new_tokens=6).text
    assert llm("hello", "-o", "max_tokens", "6").strip("\n") == expected.strip("\n")
    assert llm("hello", "--no-stream", "-o", "max_tokens", "6").strip("\n") == expected.strip("\n")
    assert llm("hello", "-o", "temperature", "0.7", "-o", "seed", "3", "-o", "max_tokens", "4")


def test_the_document_describes_what_is_there(live):
    document = httpx.get(f"{live.url}/openapi.json").json()
    assert set(document["paths"]) == {
        CHAT,
        "/v1/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/metrics",
    }
    answers = document["paths"][CHAT]["post"]["responses"]
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
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from fasteagle.cli.main import main\n"
        "main(['serve'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'fasteagle[serve]'" in done.stderr
