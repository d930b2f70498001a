"""Tokenizers of GGUF files: converted once, checked when they are read again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from gguf import GGUFWriter

from fasteagle.errors import FasteagleError
from fasteagle.loading import gguf_tokenizer
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.gguf_tokenizer import converted_gguf, in_one_line, set_pre_tokenizer
from fasteagle.loading.tokenizer import load_tokenizer
from gguf_files import finish
from helpers import edit_json

USER = [{"role": "user", "content": "Hi"}]


def write_gguf_tokenizer(path, pre: str) -> None:
    """A GGUF file with a byte-level tokenizer that has merges for digits and for blanks."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "Ġ Ġ", "Ġ 1"]
    words = [*alphabet, "12", "123", "ĠĠ", "Ġ1", "<|im_start|>", "<|im_end|>"]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([1] * (len(words) - 2) + [3, 3])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(words) - 1)
    writer.add_bos_token_id(len(words) - 2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 8),
        (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    import numpy as np

    writer.add_tensor("token_embd.weight", np.zeros((len(words), 8), np.float32))
    finish(writer)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", None),
        ("smollm", [" ", "1", "2", "3", "1", "2", "3"]),
        ("llama-bpe", [" ", "123", "123"]),
        ("qwen2", [" ", "1", "2", "3", "1", "2", "3"]),
    ],
)
def test_gguf_splitting_rules(tmp_path, pre, pieces):
    path = tmp_path / "m.gguf"
    write_gguf_tokenizer(path, pre)
    tokenizer = load_tokenizer(path)
    texts = [tokenizer.decode([i]) for i in tokenizer.encode(" 123123")]
    if pre == "gpt-2":  # one word for GPT-2's rule: merges run across all six digits
        assert "".join(texts) == " 123123" and len(texts) < 7
    else:
        assert texts == pieces


def test_a_word_that_is_a_token_needs_no_merge(tmp_path):
    """Llama 3's tokenizer looks a word up before it merges, and its GGUF files say so by name."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    for pre, n in (("llama-bpe", 1), ("qwen2", 4)):
        path = tmp_path / f"{pre}.gguf"
        write_gguf_tokenizer(path, pre)
        words = {c: i for i, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "(cde"])}
        made = Tokenizer(models.BPE(words, []))
        backend = PreTrainedTokenizerFast(tokenizer_object=made)
        set_pre_tokenizer(backend, path)
        assert len(backend.encode("(cde", add_special_tokens=False)) == n


@pytest.mark.parametrize(("model", "pre"), [("llama", "another"), ("gpt2", None)])
def test_rules_that_are_left_as_transformers_makes_them(tmp_path, model, pre):
    """SentencePiece has none, and a byte-level file that names none means GPT-2's."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    finish(writer)
    set_pre_tokenizer(None, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(1), MemoryError(), FasteagleError("one line")]
)
def test_what_is_no_fault_of_the_files_is_not_blamed_on_them(error):
    with pytest.raises(type(error)) as caught, in_one_line("no usable tokenizer"):
        raise error
    assert caught.value is error


def test_a_tokenizer_that_another_process_has_converted_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf_tokenizer(path, "smollm")

    def other_process(backend, path):
        monkeypatch.setattr(gguf_tokenizer, "set_pre_tokenizer", set_pre_tokenizer)
        converted_gguf(path)

    monkeypatch.setattr(gguf_tokenizer, "set_pre_tokenizer", other_process)
    assert load_tokenizer(path).render(USER) == "<|im_start|>Hi"


def test_gguf_template_special_tokens_and_cache(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf_tokenizer(path, "smollm")
    tokenizer = load_tokenizer(path)
    text = tokenizer.render(USER)
    assert text == "<|im_start|>Hi"
    assert len(tokenizer.encode(text)) == 3
    assert len(tokenizer.eos_ids) == 1
    monkeypatch.setattr(
        "fasteagle.loading.gguf_tokenizer.set_pre_tokenizer", lambda *a: pytest.fail("again")
    )
    assert load_tokenizer(path).encode(text) == tokenizer.encode(text)


def test_a_gguf_file_beside_other_files_has_its_own_tokenizer(tmp_path, tiny_dir):
    """And config: nothing beside it is read, no code runs."""
    write_gguf_tokenizer(tmp_path / "m.gguf", "smollm")
    alone = load_tokenizer(tmp_path / "m.gguf").encode("a 12")
    beside = shutil.copytree(tiny_dir, tmp_path / "beside")
    own = {"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.Own"}
    for name in ("config.json", "tokenizer_config.json"):
        edit_json(beside / name, auto_map=own, tokenizer_class="Own")
    (beside / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    path = shutil.copy(tmp_path / "m.gguf", beside / "m.gguf")
    tokenizer = load_tokenizer(Path(path))
    assert tokenizer.encode("a 12") == alone and tokenizer.render(USER) == "<|im_start|>Hi"
    with pytest.raises(FasteagleError, match="m.gguf: 10 wrong tensors"):
        open_checkpoint(Path(path))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "damage",
    [lambda f: f.unlink(), *(lambda f, t=t: f.write_text(t) for t in ("{", "{}", "[]"))],
    ids=["gone", "half", "empty", "list"],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "sizes.json"])
def test_a_damaged_kept_tokenizer_is_made_again(tmp_path, name, damage):
    path = tmp_path / "m.gguf"
    write_gguf_tokenizer(path, "smollm")
    before = load_tokenizer(path).render(USER)
    damage(converted_gguf(path) / name)
    assert load_tokenizer(path).render(USER) == before == "<|im_start|>Hi"


def test_unknown_gguf_splitting_rule_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf_tokenizer(path, "deepseek-v3")
    with pytest.raises(FasteagleError, match="pre-tokenizer 'deepseek-v3' is not supported"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"its tokenizer cannot be converted \('tokens' is missing\): use other files of it"),
        (
            {"tokens": ["a", "b", "ab"], "merges": ["a b"], "pre": ["smollm"]},
            r"GGUF pre-tokenizer \['smollm'\] is not supported",
        ),
    ],
)
def test_fields_that_are_missing_or_of_a_wrong_type(tmp_path, fields, message):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    for name, value in fields.items():
        writer.add_array(f"tokenizer.ggml.{name}", value)
    finish(writer)
    with pytest.raises(FasteagleError, match=message):
        load_tokenizer(tmp_path / "m.gguf")


def test_a_file_that_has_changed_is_converted_again(tmp_path):
    """Also where it has the same size."""
    path = tmp_path / "m.gguf"
    write_gguf_tokenizer(path, "smollm")
    folder = converted_gguf(path)
    assert converted_gguf(path) == folder
    os.utime(path, ns=(0, 1))
    assert converted_gguf(path) != folder
