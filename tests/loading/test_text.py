"""Conversations that a model makes up."""

from __future__ import annotations

import json

import torch

from fasteagle.generate import Engine


def test_a_model_makes_up_conversations(tmp_path, tiny_dir):
    """Whole ones, the same each time, and a cut-off file is continued."""
    from fasteagle.loading.checkpoint import load_model, open_checkpoint
    from fasteagle.loading.text import write_conversations
    from fasteagle.loading.tokenizer import load_tokenizer

    model = load_model(
        open_checkpoint(tiny_dir), dtype=torch.float32, device="cpu", max_seq_len=256
    )
    engine, tokenizer = Engine(model, 256), load_tokenizer(tiny_dir)
    whole = write_conversations(engine, tokenizer, tmp_path / "a.jsonl", 300, 12)
    lines = whole.read_text().splitlines()
    assert sum(len(json.loads(line)["ids"]) for line in lines) >= 300
    assert [json.loads(line)["T"] for line in lines[:3]] == [0.0, 0.7, 1.0]
    part = tmp_path / "b.jsonl"
    part.write_text("\n".join(lines[:2]) + "\n" + lines[2][:9])
    write_conversations(engine, tokenizer, part, 300, 12)
    assert part.read_text().splitlines() == lines
    few = write_conversations(
        engine, tokenizer, tmp_path / "c.jsonl", 300, 12, enough=lambda n: n >= 2
    )
    assert few.read_text().splitlines() == lines[:2]
    more = write_conversations(engine, tokenizer, tmp_path / "d.jsonl", 30, 12, fewest=4)
    found = more.read_text().splitlines()
    assert len(found) == 4 and found[:3] == lines[:3]
