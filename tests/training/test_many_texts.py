"""Many texts at once: as the engine writes them, requests that wait, features, the kernel."""

from __future__ import annotations

import json
import re

import pytest
import torch

import train_on_card
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.open import open_model
from fasteagle.options import SamplingParams
from fasteagle.prompts import Conversation, read_conversations
from fasteagle.training import many_texts
from fasteagle.training.dialogues import Request
from fasteagle.training.many_texts import ManyTexts, features_of
from head_files import load_head
from helpers import Letters, invoke, random_target, tiny_config, write_questions, write_random_text

GREEDY, DRAWN = SamplingParams(), SamplingParams(1.0)


@pytest.fixture
def tokenizer():
    letters = Letters(60)
    letters.eos_ids = frozenset(range(0, 60, 16))
    return letters


def answered(writer: ManyTexts, requests: list[Request]) -> dict[int, object]:
    for number, request in enumerate(requests):
        writer.begin(number, request)
    replies: dict[int, object] = {}
    for _ in range(100):
        replies |= writer.replies()
        if len(replies) == len(requests):
            return replies
    raise AssertionError(f"only {len(replies)} of {len(requests)} are answered")


def request(text: str, params=GREEDY, n=30) -> Request:
    return Request(({"role": "user", "content": text},), params, n)


def test_texts_are_those_of_the_engine(target, tokenizer):
    """Five requests for three slots; drawn texts beside greedy ones, and one that has no room."""
    batch = [request("abcdefghijkl"[i : 4 + 2 * i], GREEDY if i % 3 else DRAWN) for i in range(5)]
    replies = answered(ManyTexts(target, tokenizer, 3, 64), [*batch, request("x" * 64)])
    assert replies.pop(5) is None
    engine, ends = Engine(target, 256), tokenizer.eos_ids
    for number, reply in replies.items():
        assert reply.prompt == tokenizer.encode(batch[number].messages[0]["content"])
        assert reply.text == tokenizer.decode(reply.ids)
        assert reply.is_cut == (reply.ids[-1] not in ends)
        assert len(reply.ids) <= 30
        assert not ends & set(reply.ids[:-1])
        if number % 3:
            alone = engine.generate(reply.prompt, GREEDY, 30, ends)
            assert reply.ids == [token for new in alone for token in new]


def test_a_slot_ends_a_text_that_is_full(target, tokenizer):
    tokenizer.eos_ids = frozenset()
    (reply,) = answered(ManyTexts(target, tokenizer, 2, 40), [request("abc", n=500)]).values()
    assert len(reply.prompt) + len(reply.ids) == 40
    assert reply.is_cut


def test_a_text_that_repeats_itself_is_stopped(target, tokenizer, monkeypatch):
    tokenizer.eos_ids = frozenset()
    monkeypatch.setattr(many_texts, "ends_in_repetition", lambda ids: len(ids) > 10)
    (reply,) = answered(ManyTexts(target, tokenizer, 1, 400), [request("abc", n=390)]).values()
    assert 10 < len(reply.ids) <= 10 + many_texts.STEPS * many_texts.LOOKS
    assert reply.is_cut


def test_draws_follow_the_temperature(target, tokenizer):
    """Of one prompt's next tokens, drawn 2,000 times."""
    torch.manual_seed(0)
    tokenizer.eos_ids = frozenset()
    batch = [request("abcd", SamplingParams(0.7), 1)] * 2000
    drawn = [
        reply.ids[0] for reply in answered(ManyTexts(target, tokenizer, 2000, 8), batch).values()
    ]
    features = Engine(target, 256).features(tokenizer.encode("abcd"))
    wanted = (target.lm_head(features[-1:])[0].float() / 0.7).softmax(-1)
    shares = torch.tensor(drawn).bincount(minlength=len(wanted)) / len(drawn)
    assert (shares - wanted).abs().sum() / 2 < 0.125  # 0.05 is usual for a sample of this size


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_features_are_those_of_the_engine(target, text, layers):
    engine = Engine(target, 256)
    for conversation, part in zip(text, features_of(target, text, layers, 64), strict=True):
        whole = engine.features(conversation.ids, layers)
        torch.testing.assert_close(part, whole.to(torch.bfloat16), atol=0.02, rtol=0.02)


@pytest.mark.filterwarnings("error:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_of_attention(card, dtype):
    from fasteagle.training.many_texts_kernel import attend_prefixes

    B, G, S, E, group = 3, 2, 80, 64, 3
    torch.manual_seed(0)
    q = torch.randn(G, group * B, E).to(dtype)
    k, v = (torch.randn(B, G, S, E).to(dtype) for _ in "kv")
    last = torch.tensor([0, 64, 79])
    wanted = many_texts.attend(q.float(), k.float(), v.float(), last)
    error = 0.02 if dtype == torch.bfloat16 else 0.004
    torch.testing.assert_close(attend_prefixes(q, k, v, last).float(), wanted, atol=error, rtol=0)


def test_what_is_refused(target, tokenizer):
    writer = ManyTexts(target, tokenizer, 1, 32)
    with pytest.raises(FasteagleError, match="temperature alone"):
        writer.begin(0, request("abc", SamplingParams(1.0, top_p=0.9)))
    target = random_target(tiny_config(sliding_window=24))
    with pytest.raises(FasteagleError, match="window of 24: lower --max-len"):
        ManyTexts(target, tokenizer, 1, 32)
    ManyTexts(target, tokenizer, 1, 24)
    with pytest.raises(FasteagleError, match="sliding window"):
        features_of(target, [Conversation([1] * 25, 2)])


SMALL = {"batch_tokens": 200, "warmup": 1, "loss_vocab_size": 40}
EAGLE3 = {"algorithm": "eagle3", "self_fed_steps": 1, "draft_vocab_size": 40, **SMALL}


@pytest.fixture
def run(tiny_dir, tmp_path):
    """Runs the script on the tiny model with these recipes."""
    measured = write_random_text(tmp_path / "m.jsonl", 3, 30)
    words = ["--model", tiny_dir, "--device", "cpu", "--measure-on", measured]
    words += ["--recipes", tmp_path / "recipes.json", "--length", 200, "--out", tmp_path / "out"]

    def run(recipes, *more):
        (tmp_path / "recipes.json").write_text(json.dumps(recipes))
        return invoke(*words, *more, main=train_on_card.main)

    return run


def test_heads_are_trained_on_text_written_now(run, tiny_dir, tmp_path):
    prompts = write_questions(
        tmp_path / "prompts.jsonl", *([f"Ask {i}.", "More."] for i in range(9))
    )
    recipes = {
        "one": {"seconds": 0.1, "options": {"draft_vocab_size": 40, **SMALL}},
        "three": {"seconds": 0.1, "options": {**EAGLE3, "tap_layers": [0]}},
        "other": {"seconds": 0.1, "options": {**EAGLE3, "tap_layers": [1]}},
    }
    more = ["--prompts", prompts, "--slots", 4, "--answer-tokens", 20, "--write-seconds", 0.2]
    done = run(recipes, *more)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("features of") == 3  # those of other layers are computed anew
    config = open_model(str(tiny_dir)).checkpoint.config
    assert read_conversations(tmp_path / "out/text.jsonl", config.vocab_size, 200)
    for name, layers in (("one", ()), ("three", (0,)), ("other", (1,))):
        head, _ = load_head(tmp_path / "out" / name, config)
        assert head.config.aux_layers == layers
        record = json.loads((tmp_path / "out" / name / "training.json").read_text())
        assert record["header"]["steps"] == record["options"]["steps"]
        assert record["header"]["steps"] == record["history"][-1]["step"]
    init = str(tmp_path / "out/one")
    done = run({"again": {"seconds": 0.1, "init": init, "options": SMALL}}, *text_of(tmp_path))
    assert done.exit_code == 0, done.output
    before = json.loads((tmp_path / "out/one/training.json").read_text())["header"]
    tau = re.search(r"before: tau ([\d.]+)", done.stderr)
    assert float(tau[1]) == pytest.approx(before["tau"], abs=0.05)  # it was saved in bf16


def text_of(tmp_path):
    """Options that name a text of an earlier run."""
    return "--text", write_random_text(tmp_path / "text.jsonl", 9, 40)


@pytest.mark.parametrize(
    ("recipes", "said"),
    [
        ([], "it is no JSON object"),
        ({"one": {"seconds": 1}}, "'options' is missing"),
        ({"one": 1}, "it is no JSON object"),
        ({"one": {"seconds": 1, "options": []}}, "it is no JSON object"),
        ({"one": {"seconds": float("nan"), "options": {}}}, "one has nan seconds"),
        ({"../one": {"seconds": 1, "options": {}}}, "'../one' is no folder's name"),
        ({"one": {"seconds": 1, "options": {"rate": 1}}}, "one has an unknown 'rate'"),
        ({"one": {"seconds": 1, "options": {}, "inti": "head"}}, "one has an unknown 'inti'"),
        ({"one": {"seconds": 1, "options": {"lr": 2}}}, "lr"),
        ({"one": {"seconds": 1, "options": {}, "init": "/none"}}, "/none"),
    ],
)
def test_recipes_that_are_none(run, tmp_path, recipes, said):
    done = run(recipes, *text_of(tmp_path))
    assert done.exit_code == 2
    assert said in done.stderr.splitlines()[-1]


def test_a_recipe_that_fails_is_named_at_the_end(run, tmp_path):
    recipes = {
        "wild": {"seconds": 0.1, "options": {**SMALL, "lr": 1.0, "clip": 1e30, "ce_weight": 1e38}},
        "good": {"seconds": 0.1, "options": SMALL},
    }
    done = run(recipes, *text_of(tmp_path))
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == "Error: not trained: wild"
    assert (tmp_path / "out/good/model.safetensors").exists()
    good = {"good": recipes["good"]}
    assert "no room for any text" in run(good, *text_of(tmp_path), "--feature-gib", 1e-6).stderr
    done = run(good, *text_of(tmp_path), "--slots", 4)
    assert "--slots has no meaning with --text" in done.stderr
