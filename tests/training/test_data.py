"""Training text: stored features, frequent tokens, held-out conversations."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.prompts import Conversation
from fasteagle.training.data import (
    Features,
    cached_features,
    choose_held_out,
    frequent_tokens,
    live_features,
    shards_of,
    store_key,
)
from fasteagle.training.data_file import note_other_writer, require_same
from fasteagle.training.parallel import Ranks
from training_cases import talk


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr("fasteagle.training.data.SHARD_TOKENS", 100)


def test_features_are_the_targets_and_shards_resume(target, tmp_path, small_shards, monkeypatch):
    needs: list[int] = []
    free_space = "fasteagle.training.data.require_free_space"
    monkeypatch.setattr(free_space, lambda folder, n_bytes, task: needs.append(n_bytes))
    text, engine = talk(target, 12), Engine(target, 256)
    store, live = cached_features(engine, text, tmp_path / "f"), live_features(engine, text)
    shards = sorted((tmp_path / "f").iterdir())
    sizes = [sum(len(c.ids) for c in group) for group in shards_of(text).values()]
    assert len(shards) == len(sizes) > 2 and len(store) == 12
    assert all(100 <= size < 140 for size in sizes[:-1])
    for i, conversation in enumerate(text):
        ids, features = store.conversation(i)
        assert ids.tolist() == conversation.ids
        assert torch.equal(features, engine.features(conversation.ids).bfloat16())
        assert torch.equal(features, live.conversation(i)[1])
    shards[-1].unlink()
    before = [path.stat().st_mtime_ns for path in shards[:-1]]
    again = cached_features(engine, text, tmp_path / "f")
    assert torch.equal(again.conversation(11)[1], features)
    assert [path.stat().st_mtime_ns for path in shards[:-1]] == before
    assert needs == [2 * target.config.dim * n for n in (sum(sizes), sizes[-1])]
    cached_features(engine, text, tmp_path / "aux", aux_layers=(0, 1))
    assert needs[-1] == 3 * needs[0]


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
        class Counting(Engine):
            def features(self, ids, *more):
                done[rank].append(len(ids))
                return super().features(ids, *more)

        return cached_features(Counting(target, 256), text, folder, ranks=Threads(rank, 2))

    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(write, range(2)))
    alone = cached_features(Engine(target, 256), text, tmp_path / "alone")
    assert done[0] and done[1]
    assert sum(map(sum, done)) == sum(len(c.ids) for c in text)
    for store in stores:
        for i in range(len(text)):
            assert all(map(torch.equal, store.conversation(i), alone.conversation(i)))


def test_frequent_tokens_and_held_out():
    text = [Conversation([1, 2, 9, 9, 7, 7, 5, 5, 5], 2, i % 2 == 1) for i in range(10)]
    assert frequent_tokens(text, 2).tolist() == [5, 7], "the lower of two as frequent ones"
    assert frequent_tokens(text, 5).tolist() == [0, 1, 5, 7, 9]
    prior = [40, 7, 30]
    assert frequent_tokens(text, 4, prior).tolist() == [5, 7, 9, 40]
    assert frequent_tokens(text, 6, prior).tolist() == [0, 5, 7, 9, 30, 40]
    among = torch.tensor([3, 4, 9, 12])
    assert frequent_tokens(text, 1, among=among).tolist() == [9]
    assert frequent_tokens(text, 3, among=among).tolist() == [3, 4, 9]
    assert choose_held_out(text, 3) == [1, 3, 7]
    assert choose_held_out(text, 5) == [1, 3, 5, 7, 9]
    assert len(set(choose_held_out(text, 8))) == 8


def test_other_layers_and_other_text_have_other_features():
    text = [Conversation([1, 2, 3], 2), Conversation([4, 5], 1)]
    others = [Conversation([1, 2, 3], 1), text[1]], [Conversation([1, 2], 2), text[1]], text[:1]
    keys = [store_key(text, "a"), store_key(text, "b"), *(store_key(t, "a") for t in others)]
    keys += [store_key(text, "a", layers) for layers in ((1, 2), (1, 3))]
    assert len(set(keys)) == 7


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


def test_a_setting_that_only_the_begun_run_had_is_named(tmp_path):
    with pytest.raises(FasteagleError, match="other settings .kv int8 -> None.: give the same"):
        require_same(tmp_path, {"kv": "int8"}, {})
