"""A chat with the tiny model."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fasteagle.cli import main as cli


@pytest.fixture
def chat(tiny_dir):
    """`fasteagle chat` with one question and more options."""
    command = ["chat", "--model", str(tiny_dir), "-p", "hello"]
    return lambda *options: CliRunner().invoke(cli.main, [*command, *map(str, options)])
