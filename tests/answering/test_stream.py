"""Text out of tokens: characters split between tokens, and stop strings."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fasteagle.answering.stream import TextStream, ThoughtSplitter, opened_thought


class Bytes:
    """One token a byte, as the worst tokenizer would have it."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """Tokens are pieces of text."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


def feed(stream, ids):
    return [stream.push([i]) for i in ids] + [stream.finish()]


def test_wrong_bytes_inside_do_not_hold_up_the_rest():
    pieces = feed(TextStream(Bytes()), b"a\xffbc")
    assert "".join(pieces) == "a\ufffdbc" and pieces[2] == "\ufffdb"


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["one ", "two ", "three"], ["two"], "one "),
        (["ab", "cd", "ef"], ["bcde"], "a"),
        (["ab", "cd", "ef"], ["f"], "abcde"),
        (["ab", "ab", "ac"], ["abac"], "ab"),
        (["x", "a", "a", "b"], ["aab"], "x"),
        (["x\n", "\nUser", ": hi"], ["\n\nUser:", "zzz"], "x"),
        (["aXbY"], ["Y", "X"], "a"),
    ],
)
def test_stop_strings_end_the_text_wherever_tokens_split_them(pieces, stop, expected):
    stream = TextStream(Words(*pieces), stop)
    out = "".join(feed(stream, range(len(pieces))))
    assert out == expected and stream.stopped
    assert stream.push([0]) == stream.finish() == ""


def test_the_beginning_of_a_stop_string_is_held_back_then_released():
    stream = TextStream(Words("a", "EN", "D", "x"), ["END!"])
    assert [stream.push([i]) for i in range(4)] == ["a", "", "", "ENDx"]
    stream = TextStream(Words("a", "EN"), ["END!"])
    assert [stream.push([0]), stream.push([1]), stream.finish()] == ["a", "", "EN"]
    assert not stream.stopped


class Decoder:
    """A decoder whose first 256 tokens are the bytes."""

    def __init__(self, vocabulary, merges, decoder, splitter=None, **settings):
        words = {word: token for token, word in enumerate(vocabulary)}
        self.tokenizer = Tokenizer(models.BPE(words, merges, **settings))
        self.tokenizer.decoder = decoder
        if splitter is not None:
            self.tokenizer.pre_tokenizer = splitter
        self.tokenizer.add_special_tokens(["<s>"])
        self.size, self.n_decoded = self.tokenizer.get_vocab_size(), 0

    def decode(self, ids):
        self.n_decoded += len(ids)
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def byte_level():
    letters = bytes_to_unicode()
    pairs = [(letters[a], letters[b]) for a, b in (b"\x80\xe2", b"\x99s", b"ab", b"\x8d\xf0")]
    words = [*(letters[byte] for byte in range(256)), *map("".join, pairs)]
    return Decoder(words, pairs, decoders.ByteLevel(), pre_tokenizers.ByteLevel())


def byte_fallback():
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    parts.append(decoders.Strip(" ", 1, 0))
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581Hello", "\u2581", "b", "\u4e2d"]
    return Decoder(words, [], decoders.Sequence(parts), byte_fallback=True)


def wrong_ids(rng):
    text = "\u2019\xe9\u4e2d\U0001f642ab".encode()
    ids = []
    while len(ids) < 100:
        start = rng.randrange(len(text))
        wrong = [rng.choice([0x80, 0xE2, 0xFF])] * rng.randint(1, 25)
        ids += rng.choice([wrong, text[start : start + rng.randint(1, 12)]])
    return ids


PIECES = ["ab", " b", "\u2019s", "\xe9", "\u4e2d\u6587", "\U0001f642", "\u2000" * 40]
PIECES += ["\U0001f468\u200d\U0001f469\u200d\U0001f467"]


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_the_text_is_that_of_one_decode_however_the_tokens_come(made):
    """Passes of one size can all end within a character, and tokens within the next one.

    A cycle that accepts no guess pushes an empty part before its one token.
    """
    decoder, rng = made(), random.Random(0)
    for i in range(240):
        text = "".join(rng.choice(PIECES) * rng.choice([1, 1, 40]) for _ in range(5))
        ids = decoder.tokenizer.encode(text).ids
        if made is byte_level and i % 3 == 0:
            ids = wrong_ids(rng)
        sizes = rng.choice([[1], [4], [8], [0, 1, 2, 3, 4, 5, 6]])
        stream, out, at = TextStream(decoder), "", rng.choice([0, 1, 3])
        out += stream.push(ids[:at])
        while at < len(ids):
            n = rng.choice(sizes)
            out += stream.push(ids[at : at + n])
            at += n
        assert out + stream.finish() == decoder.decode(ids)


def split(text, step, opened=""):
    """The thought and the rest of `text`, given in pieces of `step` characters."""
    splitter = ThoughtSplitter(opened)
    parts = [p for i in range(0, len(text), step) for p in splitter.push(text[i : i + step])]
    parts += splitter.finish()
    assert "".join(part for part, _ in parts) == text and all(part for part, _ in parts)
    kinds = [is_thought for _, is_thought in parts]
    assert kinds == sorted(kinds, reverse=True)  # a thought comes first
    thought = "".join(part for part, is_thought in parts if is_thought)
    return thought, splitter.closed(text)


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("opened", "text", "thought"),
    [
        ("", "plain < text", ""),
        ("", "<think>a < b </thin</think>so", "<think>a < b </thin</think>"),
        ("", "<th", ""),
        ("", "say <think>aloud</think>", ""),  # only an answer's beginning is a thought
        ("", "<b><think>x</think>", ""),
        ("<think>\n", "a\n</think>\n\nb", "a\n</think>"),
        ("<think>\n", "<think></think></think>", "<think></think>"),
    ],
)
def test_the_thought_of_an_answer(step, opened, text, thought):
    assert split(text, step, opened) == (thought, opened + text)


@pytest.mark.parametrize("step", [1, 100])
def test_a_thought_that_is_cut_short_is_closed(step):
    assert split("<think>a</th", step) == ("<think>a</th", "<think>a</th\n</think>\n\n")
    assert split("<think>", step) == ("<think>", "<think>\n</think>\n\n")
    assert split("a", step, "<think>\n") == ("a", "<think>\na\n</think>\n\n")


def test_blanks_before_a_thought_are_no_answer():
    splitter = ThoughtSplitter()
    assert splitter.push("\n") == splitter.push("<thi") == []
    assert splitter.push("nk>a") == [("\n<think>a", True)]
    splitter = ThoughtSplitter()
    assert splitter.push("\n") == [] and splitter.push("a") == [("\na", False)]
    splitter = ThoughtSplitter()
    assert splitter.push("\n") == [] and splitter.finish() == [("\n", False)]
    assert ThoughtSplitter(may_begin=False).push("<think>") == [("<think>", False)]


def test_a_prompt_can_open_the_thought():
    assert opened_thought("user: hi\nassistant: <think>\n") == "<think>\n"
    assert opened_thought("<think>\n\n</think>\n\n") == ""
    assert opened_thought("<think>a</think>b\n<think>") == "<think>"
    assert opened_thought("what does <think> do?") == opened_thought("") == ""


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
@pytest.mark.parametrize("wrong", [b"\x80", b"\xe2\x80", b"\xf0\x9f"])
def test_wrong_bytes_do_not_hold_back_the_text_for_long(made, wrong):
    """Nor does the work for a token grow with their number."""
    decoder, ids = made(), list(wrong * 1000)
    pieces = feed(TextStream(decoder), ids)
    assert decoder.n_decoded < 150 * len(ids)
    assert "".join(pieces) == decoder.decode(ids)
    assert all(any(pieces[i : i + 16]) for i in range(len(ids) - 16))
