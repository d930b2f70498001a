"""Opening a model: what a person is told meanwhile."""

from __future__ import annotations

import time

import pytest

from fasteagle.loading import open as opening
from fasteagle.loading.open import open_model


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, []), (0.4, ["opening model ..."])])
def test_a_line_appears_where_opening_takes_long(tiny_dir, monkeypatch, seconds, lines):
    monkeypatch.setattr(opening, "PATIENCE", 0.2)
    monkeypatch.setattr(opening, "open_checkpoint", lambda path: None)
    monkeypatch.setattr(opening, "load_tokenizer", lambda *a: time.sleep(seconds))
    said = []
    opened = open_model(str(tiny_dir), said.append)
    assert said == lines and opened.seconds >= seconds
    time.sleep(0.4)
    assert said == lines
