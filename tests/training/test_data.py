"""Training text: stored features, frequent tokens, held-out conversations, wrong files."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.prompts import Conversation, read_conversations
from fasteagle.training.data import FeatureStore, choose_held_out, compute_features, frequent_tokens
from fasteagle.training.parallel import Ranks
from helpers import random_target, talk, tiny_config


@pytest.fixture(scope="module")
def target():
    return random_target(tiny_config())


def test_features_are_the_targets_and_shards_resume(target, tmp_path, monkeypatch):
    monkeypatch.setattr("fasteagle.training.data.SHARD_TOKENS", 100)
    text = talk(target, 12)
    engine = Engine(target, 256)
    store = compute_features(engine, text, tmp_path / "f")
    assert len(list((tmp_path / "f").glob("features-*.safetensors"))) > 2
    for i, conversation in enumerate(text):
        ids, features = store.conversation(i)
        assert ids.tolist() == conversation.ids
        assert torch.equal(features, engine.features(conversation.ids).bfloat16())
    (tmp_path / "f" / "index.json").unlink()
    last = sorted((tmp_path / "f").glob("features-*.safetensors"))[-1]
    last.unlink()
    written = []
    import fasteagle.training.data as train_data

    original = train_data._write_shard
    monkeypatch.setattr(
        train_data, "_write_shard", lambda *a: (written.append(a[2].name), original(*a))
    )
    compute_features(engine, text, tmp_path / "f")
    assert written == [last.name]


def test_several_processes_write_a_part_of_the_shards_each(target, tmp_path, monkeypatch):
    monkeypatch.setattr("fasteagle.training.data.SHARD_TOKENS", 100)
    text, folder, barrier = talk(target, 12), tmp_path / "f", threading.Barrier(2, timeout=60)
    engines = [Engine(target, 256) for _ in range(2)]

    class Threads(Ranks):
        def wait(self) -> None:
            barrier.wait()

    done: list[list[int]] = [[], []]

    def write(rank: int) -> FeatureStore:
        ranks = Threads(rank, 2)
        return compute_features(engines[rank], text, folder, done[rank].append, ranks=ranks)

    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(write, range(2)))
    alone = compute_features(engines[0], text, tmp_path / "alone")
    assert done[0] and done[1]
    assert sum(map(sum, done)) == sum(len(c.ids) for c in text)
    assert (folder / "index.json").read_bytes() == (tmp_path / "alone/index.json").read_bytes()
    for store in stores:
        for i in range(len(text)):
            assert all(map(torch.equal, store.conversation(i), alone.conversation(i)))


def test_frequent_tokens_and_held_out():
    text = [Conversation([1, 2, 9, 9, 5, 5, 5], 2, i % 2 == 0) for i in range(10)]
    assert frequent_tokens(text, 2).tolist() == [5, 9]
    assert frequent_tokens(text, 4).tolist() == [0, 1, 5, 9]
    assert choose_held_out(text, 3) == [0, 2, 6]
    assert len(set(choose_held_out(text, 8))) == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"ids": [1, 2, 3, 99], "prompt_len": 1}', "line 2: token id 99 is outside .* of 60"),
        ('{"ids": [1, -2, 3, 4], "prompt_len": 1}', "token id -2"),
        ('{"ids": [1, 2.5, 3, 4], "prompt_len": 1}', "line 2: expected"),
        ('{"ids": "abc", "prompt_len": 1}', "line 2: expected"),
        ('{"ids": [1, 2, 3, 4], "prompt_len": 0}', "line 2: expected"),
        ('{"ids": [1, 2, 3, 4]}', "line 2: expected"),
        ("nonsense", "line 2: expected"),
    ],
)
def test_text_that_cannot_be_trained_on(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text('{"ids": [1, 2, 3, 4, 5], "prompt_len": 1}\n' + line + "\n")
    with pytest.raises(FasteagleError, match=message):
        read_conversations(path, 60, 100)


def test_text_without_answers(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"ids": [1, 2, 3], "prompt_len": 3}\n')
    with pytest.raises(FasteagleError, match="no conversation with an answer"):
        read_conversations(path, 60, 100)
