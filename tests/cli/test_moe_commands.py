"""Mixtures of experts through the commands: answers of every family, and a draft head's life."""

from __future__ import annotations

import json

import pytest

from families import MOE_FAMILIES
from helpers import invoke, rest_slow, save_tiny, write_random_text


def succeeds(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize("family", rest_slow([*MOE_FAMILIES], 2))
def test_a_folder_of_every_family_answers(tmp_path, family, no_compiler):
    """Drafts change no token, quantized or not."""
    folder = save_tiny(tmp_path / "m", family, **WIDE.get(family, {}))
    chat = ("chat", "--model", folder, "-p", "hello hello hello", "--max-new-tokens", 12)
    for precision in ("fp32", ("int8-aten", "int4-g32-aten")[len(family) % 2]):
        plain = succeeds(*chat, "--precision", precision, "--no-spec")
        drafted = succeeds(*chat, "--precision", precision, "--drafter", "ngram")
        assert plain.stdout == drafted.stdout != ""


WIDE = {"mixtral": {"intermediate_size": 64}}


def test_a_draft_head_is_dense_and_lives_through_all_commands(tmp_path, no_compiler):
    folder = save_tiny(tmp_path / "m", "qwen3moe")
    text = write_random_text(tmp_path / "text.jsonl", 30, 40)
    head = tmp_path / "head"
    sizes = ("--draft-vocab-size", 128, "--batch-tokens", 200)
    train = ("--held-out", 4, "--lr", 1e-3, "--steps", 2, "--algorithm", "eagle3")
    files = ("--model", folder, "--data", text, "--out", head)
    succeeds("train-head", *files, *sizes, *train, "--tap-layers", "0,1,2")
    assert json.loads((head / "config.json").read_text())["intermediate_size"] == 96
    assert "fits" in succeeds("inspect-head", head, "--model", folder).stdout
    exported = tmp_path / "exported"
    succeeds("export-head", head, "--to", "speculators", "-o", exported, "--model", folder)
    chat = ("chat", "--model", folder, "--precision", "fp32", "-p", "hi", "--max-new-tokens", 8)
    answers = [succeeds(*chat, "--head", path).stdout for path in (head, exported)]
    assert answers == [succeeds(*chat, "--no-spec").stdout] * 2
    quantized = tmp_path / "q"
    succeeds("quantize", folder, "--precision", "int4-g32", "-o", quantized)
    model = ("--model", folder, "--precision", "int4-g32-aten", "--max-seq-len", 384)
    out = tmp_path / "calibrated"
    succeeds("calibrate-head", *model, "--head", head, "--out", out, "--data", text, "--steps", 2)
    prose = tmp_path / "prose.txt"
    prose.write_text("the cat sat on the mat and looked at the dog. " * 20)
    table = succeeds("eval", "--model", folder, "--text", prose, "--window", 64).stdout
    assert "int4" in table
