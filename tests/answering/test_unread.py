"""Streams of one model that are read at different paces."""

from __future__ import annotations

import fasteagle
from fasteagle.answering.several import MOST_UNREAD


def test_a_stream_that_nobody_reads_waits(tiny_dir):
    """It neither fills memory nor takes the passes of the others."""
    with fasteagle.load(str(tiny_dir), precision="fp32", drafter="none") as llm:
        options = {"stream": True, "logit_bias": {5: 1000.0}, "max_new_tokens": 3 * MOST_UNREAD}
        unread = llm.chat("a b", **options)
        first = next(unread)
        assert sum(len(chunk.tokens) for chunk in llm.chat("hello", **options)) == 3 * MOST_UNREAD
        assert sum(map(len, llm.answers._unread.values())) == MOST_UNREAD
        rest = [token for chunk in unread for token in chunk.tokens]
        assert len(first.tokens) + len(rest) == 3 * MOST_UNREAD
