"""Words of messages."""

from __future__ import annotations

import pytest

from fasteagle.errors import counted
from fasteagle.server.job import TimedOutError


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 tokens"), (1, "1 token"), (1.5, "1.5 tokens"), (2000, "2,000 tokens")],
)
def test_a_noun_is_in_the_plural_for_all_but_one(count, text):
    assert counted(count, "token") == text


def test_a_second_is_one():
    assert str(TimedOutError(1.0)) == "no complete answer within 1 second"
