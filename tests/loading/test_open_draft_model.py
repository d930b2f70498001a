"""`--draft-model`: the same bytes as without, and what is refused or warned of in one line."""

from __future__ import annotations

import json

import pytest

from fasteagle.loading import checkpoint as loading
from fasteagle.loading import open as opening
from helpers import save_tiny


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "model"
    return save_tiny(folder, "llama2", num_hidden_layers=1, hidden_size=32, intermediate_size=40)


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_is_the_same(chat, small_dir, temperature):
    base = f"--max-new-tokens 30 --precision fp32 --seed 5 --temperature {temperature}".split()
    expected = chat(*base, "--no-spec").stdout
    for more in ((), ("--drafter", "model"), ("--draft-precision", "int8", "--tree-topk", 3)):
        result = chat(*base, "--draft-model", small_dir, *more)
        assert result.exit_code == 0 and result.stdout == expected, result.stderr
        assert "draft model" in result.stderr and "accepted" in result.stderr
        assert "warning" not in result.stderr
    assert "int8" in result.stderr


def refused(result):
    assert result.exit_code == 2 and result.stdout == "", result.stdout
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_another_tokenizer_is_refused_with_the_first_difference(
    chat, tmp_path, small_dir, monkeypatch
):
    other = save_tiny(tmp_path / "other", "llama2", num_hidden_layers=1)
    path = other / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocab = raw["model"]["vocab"]
    names = {token: text for text, token in vocab.items()}
    added = {**raw["added_tokens"][-1], "id": 260, "content": "<|more|>"}
    path.write_text(json.dumps(raw | {"added_tokens": [*raw["added_tokens"], added]}))
    monkeypatch.setattr(opening, "load_model", lambda *a, **k: pytest.fail("the target loaded"))
    assert "token 260 is '<|more|>' in it, missing in" in refused(chat("--draft-model", other))
    vocab[names[70]], vocab[names[90]] = 90, 70
    path.write_text(json.dumps(raw))
    line = refused(chat("--draft-model", other))
    assert "another tokenizer" in line and "token 70 is " in line
    assert repr(names[90]) in line and repr(names[70]) in line


def test_one_that_is_not_smaller_is_warned_of(chat, tiny_dir, small_dir):
    for other in (tiny_dir, small_dir):
        result = chat("--model", small_dir, "--draft-model", other, "--max-new-tokens", 5)
        assert result.exit_code == 0 and "warning: draft model" in result.stderr
        assert "guessing will cost more than it saves: use a smaller one" in result.stderr


def test_one_that_does_not_fit_beside_its_target(chat, small_dir, monkeypatch):
    devices = []

    def available(device):
        devices.append(device)
        return 10**9 if len(devices) == 1 else 1000  # the target has taken the rest

    monkeypatch.setattr(loading, "available_bytes", available)
    line = refused(chat("--draft-model", small_dir))
    assert "draft model" in line and "beside its target" in line


def test_one_of_a_shorter_context(chat, tmp_path):
    short = save_tiny(tmp_path / "short", "llama2", max_position_embeddings=128)
    line = refused(chat("--draft-model", short))
    assert "max-seq-len 512 is beyond" in line and "at most 128" in line
    result = chat("--draft-model", short, "--max-seq-len", 128, "--max-new-tokens", 5)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft-model", "x", "--drafter", "ngram"], "drop --drafter ngram"),
        (["--draft-model", "x", "--no-spec"], "drop --drafter none"),
        (["--draft-model", "x", "--head", "y", "--lookup", "z"], "drop --head and --lookup"),
        (["--draft-model", "x", "--lookup-depth", "9"], "drop --lookup-depth"),
        (["--draft-model", "x", "--tree", "y"], "drop --tree FILE"),
    ],
)
def test_options_that_do_not_go_together(chat, options, message):
    assert message in refused(chat(*options))


def test_the_bits_of_the_targets_lm_head_are_not_those_of_a_dense_draft_model(chat, small_dir):
    options = ("--precision", "int4-g32-lm4-aten", "--draft-model", small_dir)
    assert chat(*options, "--max-new-tokens", 2).exit_code == 0
