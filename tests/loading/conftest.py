"""A chat with the tiny model."""

from __future__ import annotations

import functools

import pytest

from helpers import invoke


@pytest.fixture
def chat(tiny_dir):
    """`fasteagle chat` with one question and more options."""
    return functools.partial(invoke, "chat", "--model", tiny_dir, "-p", "hello")
