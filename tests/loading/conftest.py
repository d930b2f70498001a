"""The tiny model: its files, its weights, and a chat with it."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from fasteagle.cli import main as cli
from fasteagle.loading.checkpoint import load_model, open_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tiny_dir):
    return open_checkpoint(tiny_dir)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=512)


@pytest.fixture
def chat(tiny_dir):
    """`fasteagle chat` with one question and more options."""
    command = ["chat", "--model", str(tiny_dir), "-p", "hello"]
    return lambda *options: CliRunner().invoke(cli.main, [*command, *map(str, options)])
