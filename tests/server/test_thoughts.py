"""Thoughts in replies: a field of their own, beside the text."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_a_thought_has_a_field_of_its_own(client, live, plant, monkeypatch, is_cut):
    """Whole and in a stream; one that is cut short is no text."""
    tokenizer, name = live.llm.tokenizer, live.server.name
    monkeypatch.setattr(tokenizer, "_template", f"{tokenizer._template}{{# </think> #}}")
    plant("<think>\nhm\n</think>\n\nyes")
    question = [{"role": "user", "content": "hello"}]
    options = {"model": name, "messages": question, "max_tokens": 10 if is_cut else 40}
    (whole,) = client.chat.completions.create(**options).choices
    streamed = [e.choices[0] for e in client.chat.completions.create(**options, stream=True)]
    for kind in ("content", "reasoning_content"):
        text = "".join(getattr(choice.delta, kind, None) or "" for choice in streamed)
        assert text == getattr(whole.message, kind)
    assert whole.message.content == ("" if is_cut else "yes")
    assert whole.message.reasoning_content.strip() == "hm"
    assert whole.finish_reason == streamed[-1].finish_reason == ("length" if is_cut else "stop")
