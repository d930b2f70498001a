"""Several texts written at once: the tokens of each are those that it gets alone."""

from __future__ import annotations

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.open import open_model
from fasteagle.options import RuntimeOptions, SamplingParams
from fasteagle.training import batch
from fasteagle.training.batch import BatchSampler
from helpers import random_target, tiny_config

EOS = frozenset(range(0, 60, 12))
CONFIGS = {
    "gqa": {},
    "mha": dict(n_kv_head=4),
    "window": dict(sliding_window=7),
    "qwen3": dict(qk_norm=True, head_dim=16),
}


def jobs(n: int, vocab_size: int, longest: int = 40):
    """Prompts of different lengths, greedy and sampled, each with its limit."""
    g = torch.Generator().manual_seed(n)
    for i in range(n):
        size = int(torch.randint(1, longest, (1,), generator=g))
        prompt = torch.randint(8, vocab_size, (size,), generator=g).tolist()
        params = SamplingParams((0.0, 0.7, 1.2)[i % 3], top_p=0.9, seed=i)
        yield prompt, params, 5 + 9 * (i % 5)


def alone(engine: Engine, wanted) -> list[list[int]]:
    return [[t for new in engine.generate(*job, EOS) for t in new] for job in wanted]


def together(engine: Engine, size: int, wanted) -> list[list[int]]:
    """As a caller does it: a text begins wherever one has ended."""
    sampler, waiting, texts = BatchSampler(engine, size, EOS), list(enumerate(wanted)), {}
    while waiting or not sampler.is_empty:
        while waiting and sampler.has_room:
            key, job = waiting.pop(0)
            sampler.add(key, *job)
        texts.update(sampler.step())
    return [texts[key] for key in sorted(texts)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_texts_are_those_written_alone(name, size):
    config = tiny_config(**CONFIGS[name])
    engine = Engine(random_target(config), 128)
    wanted = list(jobs(11, config.vocab_size))
    expected = alone(engine, wanted)
    assert {ids[-1] in EOS for ids in expected} == {True, False}
    assert together(engine, size, wanted) == expected


@pytest.mark.parametrize("kernels", ["native", "aten"])
def test_with_quantized_weights(tiny_dir, kernels):
    options = RuntimeOptions(device="cpu", quant="int8", cpu_kernels=kernels)
    engine = open_model(str(tiny_dir)).prepared(options).engine()
    wanted = list(jobs(7, engine.model.config.vocab_size))
    if kernels == "aten":  # whose sums depend on the number of rows
        wanted = [(prompt, params, 1) for prompt, params, _ in wanted]
    assert together(engine, 4, wanted) == alone(engine, wanted)


def test_regions_grow_with_the_longest_text():
    config = tiny_config(max_seq_len=512)
    engine = Engine(random_target(config), 512)
    wanted = [
        ([9] * 5, SamplingParams(1.0, seed=1), 30),
        (list(range(8, 58)) * 5, SamplingParams(1.0, seed=2), 30),  # ends beyond 256
        ([10] * 300, SamplingParams(), 30),
        ([11] * 510, SamplingParams(1.0, seed=3), 30),  # two tokens fit behind it
    ]
    expected = alone(engine, wanted)
    assert len(expected[3]) == 2
    assert together(engine, 2, wanted) == expected


def test_memory_that_is_not_there(monkeypatch):
    engine = Engine(random_target(tiny_config()), 512)
    sampler = BatchSampler(engine, 2, EOS)
    monkeypatch.setattr(batch, "available_bytes", lambda device: 1000)
    with pytest.raises(FasteagleError, match="2 texts of 301 tokens need .* lower --batch"):
        sampler.add(0, [9] * 300, SamplingParams(), 5)


def test_logits_that_are_not_finite():
    target = random_target(tiny_config())
    target.lm_head.weight.fill_(float("nan"))
    sampler = BatchSampler(Engine(target, 64), 2, EOS)
    with pytest.raises(FasteagleError, match="not finite at position 3: try --precision fp32"):
        sampler.add(0, [9, 10, 11], SamplingParams(), 5)


@pytest.mark.real_model
def test_the_default_model_as_its_file_holds_it():
    opened = open_model("smollm2-135m")
    engine, tokenizer = opened.prepared(RuntimeOptions(max_seq_len=256)).engine(), opened.tokenizer
    wanted = [
        (tokenizer.encode(tokenizer.render([{"role": "user", "content": text}])), params, 12)
        for text, params in (
            ("Why is the sky blue?", SamplingParams()),
            ("Name three rivers.", SamplingParams(0.8, top_p=0.95, seed=5)),
            ("Hello", SamplingParams(1.0, seed=6)),
        )
    ]
    assert together(engine, 2, wanted) == alone(engine, wanted)
