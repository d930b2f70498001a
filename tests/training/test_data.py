"""Training text: stored features, frequent tokens, held-out conversations."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.prompts import Conversation, read_conversations
from fasteagle.training.data import Features, cached_features, choose_held_out, frequent_tokens
from fasteagle.training.data_file import note_other_writer
from fasteagle.training.parallel import Ranks
from training_cases import talk


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr("fasteagle.training.data.SHARD_TOKENS", 100)


def test_features_are_the_targets_and_shards_resume(target, tmp_path, small_shards):
    text, engine = talk(target, 12), Engine(target, 256)
    store = cached_features(engine, text, tmp_path / "f")
    shards = sorted((tmp_path / "f").iterdir())
    assert len(shards) > 2 and len(store) == 12
    for i, conversation in enumerate(text):
        ids, features = store.conversation(i)
        assert ids.tolist() == conversation.ids
        assert torch.equal(features, engine.features(conversation.ids).bfloat16())
    shards[-1].unlink()
    before = [path.stat().st_mtime_ns for path in shards[:-1]]
    again = cached_features(engine, text, tmp_path / "f")
    assert torch.equal(again.conversation(11)[1], features)
    assert [path.stat().st_mtime_ns for path in shards[:-1]] == before


def test_a_damaged_shard_is_made_again(target, tmp_path, small_shards, capsys):
    text, engine = talk(target, 12), Engine(target, 256)
    store = cached_features(engine, text, tmp_path / "f")
    first, *_, last = sorted((tmp_path / "f").iterdir())
    whole = first.read_bytes()
    for path, content in ((first, whole[:-9]), (last, b"")):
        path.unlink()  # the old file stays mapped
        path.write_bytes(content)
    again = cached_features(engine, text, tmp_path / "f")
    assert torch.equal(again.conversation(0)[1], store.conversation(0)[1])
    assert first.read_bytes() == whole
    assert capsys.readouterr().err.count("are damaged and are computed again") == 2


def test_several_processes_write_a_part_of_the_shards_each(target, tmp_path, small_shards):
    text, folder, barrier = talk(target, 12), tmp_path / "f", threading.Barrier(2, timeout=60)

    class Threads(Ranks):
        def wait(self) -> None:
            barrier.wait()

    done: list[list[int]] = [[], []]

    def write(rank: int) -> Features:
        engine, ranks = Engine(target, 256), Threads(rank, 2)
        return cached_features(engine, text, folder, done[rank].append, ranks=ranks)

    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(write, range(2)))
    alone = cached_features(Engine(target, 256), text, tmp_path / "alone")
    assert done[0] and done[1]
    assert sum(map(sum, done)) == sum(len(c.ids) for c in text)
    for store in stores:
        for i in range(len(text)):
            assert all(map(torch.equal, store.conversation(i), alone.conversation(i)))


def test_frequent_tokens_and_held_out():
    text = [Conversation([1, 2, 9, 9, 5, 5, 5], 2, i % 2 == 0) for i in range(10)]
    assert frequent_tokens(text, 2).tolist() == [5, 9]
    assert frequent_tokens(text, 4).tolist() == [0, 1, 5, 9]
    among = torch.tensor([3, 4, 9, 12])
    assert frequent_tokens(text, 1, among=among).tolist() == [9]
    assert frequent_tokens(text, 3, among=among).tolist() == [3, 4, 9]
    assert choose_held_out(text, 3) == [0, 2, 6]
    assert len(set(choose_held_out(text, 8))) == 8


def test_text_without_an_answer(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"ids": [1, 2, 3], "prompt_len": 3}\n')
    with pytest.raises(FasteagleError, match="no conversation with an answer"):
        read_conversations(path, 60, 100)


def test_text_of_another_model_is_named(tmp_path, capsys):
    path = tmp_path / "text.jsonl"
    note_other_writer(path, "a", "1" * 64)  # nobody knows who wrote it
    settings = tmp_path / "text.jsonl.settings.json"
    for written, warns in (
        ('{"model": "/x/a", "fingerprint": "0"}', False),  # at another precision
        ('{"model": "b", "fingerprint": "1111"}', False),  # by another name
        ('{"model": "b", "fingerprint": "0"}', True),
        ("[]", False),
        ('{"model": 3, "fingerprint": null}', True),
        ("{", False),
    ):
        settings.write_text(written)
        note_other_writer(path, "/y/a", "1" * 64)
        assert ("was written by" in capsys.readouterr().err) == warns, written
