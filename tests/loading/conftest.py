"""The tiny model's files and weights, for the tests of its draft heads."""

from __future__ import annotations

import pytest
import torch

from fasteagle.loading.checkpoint import load_model, open_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tiny_dir):
    return open_checkpoint(tiny_dir)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=512)
