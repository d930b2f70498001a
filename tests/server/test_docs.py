"""The recipes of docs/serving.md and the README run as they stand, with a tiny model."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import openai
import pytest

import fasteagle.llm

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text()
README = (ROOT / "README.md").read_text()


def blocks(text, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


RECIPES = [code for code in blocks(PAGE, "python") if "fasteagle.load" in code]
assert RECIPES, "the page has recipes"


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_python_recipes(number, tiny_dir, monkeypatch, capsys):
    original, made = fasteagle.llm.load, []

    def load(name, **options):
        assert name == "smollm2-135m"
        made.append(original(str(tiny_dir), precision="fp32", **{"drafter": "ngram", **options}))
        return made[-1]

    monkeypatch.setattr(fasteagle.llm, "load", load)
    exec(RECIPES[number], {})
    assert len(made) == 1


@pytest.mark.parametrize("text", [PAGE, README], ids=["serving.md", "README"])
def test_client_recipes(text, live, monkeypatch, capsys):
    (code,) = [code for code in blocks(text, "python") if "OpenAI" in code]
    original = openai.OpenAI.__init__

    def init(self, base_url, **options):
        assert base_url == "http://127.0.0.1:8000/v1"
        original(self, base_url=f"{live.url}/v1", **options)

    monkeypatch.setattr(openai.OpenAI, "__init__", init)
    exec(code.replace("smollm2-135m", live.server.name), {})
    assert capsys.readouterr().out.strip()


def test_curl_recipe(live):
    (command,) = [
        line for code in blocks(PAGE, "sh") for line in code.splitlines() if "curl" in line
    ]
    command = command.replace("http://127.0.0.1:8000", live.url)
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert '"text_completion"' in done.stdout
