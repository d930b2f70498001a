"""Known texts: their tokens go on, and what follows them is encoded as if it stood in one text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from fasteagle.answering.known_texts import KNOWN_TEXTS, KnownTexts
from fasteagle.loading.tokenizer import ChatTokenizer, load_tokenizer


@pytest.fixture
def byte_level(tiny_dir):
    return load_tokenizer(tiny_dir)


@pytest.fixture
def blanks_first():
    """A tokenizer that puts a blank before every text, as SentencePiece does."""
    letters = {letter: i for i, letter in enumerate("▁abc\n<|>end")}
    tokenizer = Tokenizer(models.BPE(letters, []))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<|a"])
    backend = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return ChatTokenizer(backend, frozenset(), "{{ messages }}<|a")


def known(tokenizer, text, answer):
    """Texts of which one is `text` with an `answer`, both in the tokenizer's own tokens."""
    texts = KnownTexts(tokenizer)
    whole = tokenizer.encode(text + answer)
    prompt = tokenizer.encode(text)
    texts.add(text, prompt, whole[len(prompt) :])
    return texts


@pytest.mark.parametrize("rest", ["x", "<|end|>", "<|end|>x"])
def test_the_longest_known_text_goes_on(byte_level, rest):
    """By the tokens that it had last."""
    texts = KnownTexts(byte_level)
    for text, ids in (("ab", [1]), ("abcd", [5]), ("abcd", [2, 3]), ("abc", [4])):
        texts.add(text, ids, [])
    assert texts.encode("abcd" + rest) == [2, 3, *byte_level.encode(rest)]


def test_the_oldest_known_text_is_forgotten(byte_level):
    texts = KnownTexts(byte_level)
    for i in range(KNOWN_TEXTS + 1):
        texts.add(f"{i:02}", [i], [])
    assert texts.encode("00") == byte_level.encode("00") and texts.encode("01") == [1]


@pytest.mark.parametrize("begun", ["<", "<|", "<|end|"])
def test_a_known_text_that_ends_inside_a_special_token_is_none(byte_level, begun):
    """A stop string `<` is in the tokens, not in the answer that the client sends back."""
    texts = known(byte_level, "<|user|>a<|end|><|assistant|>", f"foo{begun}")
    shorter = "<|user|>a<|end|><|assistant|>", [1, 2, 3]
    texts.add(*shorter, [])
    text = "<|user|>a<|end|><|assistant|>foo<|end|><|user|>b"
    rest = byte_level.encode("foo<|end|><|user|>b")
    assert texts.encode(text) == [1, 2, 3, *rest]
    plain = f"<|user|>a<|end|><|assistant|>foo{begun} b"
    assert byte_level.raw(texts.encode(plain)) == plain


@pytest.mark.parametrize("rest", ["c", " c", "<|end|>a", "<|ac", "c<\ufdd0|end|>c", "\nc", ""])
def test_the_rest_of_a_known_text_gets_no_blank(blanks_first, rest):
    texts = known(blanks_first, "a", "b")
    assert texts.encode("ab" + rest) == blanks_first.encode("ab" + rest)
