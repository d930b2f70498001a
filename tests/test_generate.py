"""The engine: against transformers, against itself without a cache, and at every kind of end."""

from __future__ import annotations

import pytest
import torch

from fasteagle.batch import Batch
from fasteagle.compile.measurement import Measurement
from fasteagle.decoding.stats import Stats
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.model import Target
from fasteagle.options import SamplingParams
from fasteagle.shapes import TreeShape
from helpers import (
    GREEDY,
    Even,
    assert_true_pairs,
    finished,
    generated,
    make_hf_model,
    random_head,
    random_target,
    tiny_config,
    verify_rows,
)
from test_batch import begin

SAMPLED = SamplingParams(0.9, top_p=0.95, repetition_penalty=1.2, seed=11)
PROMPT = [5, 9, 200, 17, 33, 8, 120, 64]


@pytest.fixture
def engine(model):
    return Engine(model, max_seq_len=512)


@pytest.mark.parametrize(
    ("family", "penalty"), [("llama3", 1.0), ("mistral", 1.0), ("qwen3", 1.0), ("smollm2", 1.3)]
)
def test_greedy_equals_transformers(family, penalty, tmp_path):
    """With a window, biases and head norms, and under a penalty of prompt and answer."""
    hf = make_hf_model(family)
    hf.save_pretrained(tmp_path)
    ours = load_model(open_checkpoint(tmp_path), dtype=torch.float32, device="cpu", max_seq_len=256)
    ends = dict(max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    options = dict(do_sample=False, repetition_penalty=penalty, **ends)
    expected = hf.generate(torch.tensor([PROMPT]), **options)
    params = SamplingParams(repetition_penalty=penalty)
    assert generated(Engine(ours, 256), 40, PROMPT, params) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_long_run_equals_computing_every_prefix_anew(engine, model, params):
    """Crosses a cache step (256 slots); the penalty sees prompt and answer."""
    prompt = PROMPT * 30
    out = generated(engine, 40, prompt, params)
    for i in (0, 1, 15, 16, 17, 39):
        assert generated(Engine(model, 512), 1, prompt + out[:i], params) == out[i : i + 1]


def test_timing_passes_leaves_the_conversation_alone(engine, model):
    before = generated(engine, 10, PROMPT)
    for rows in (1, 2):
        Measurement(engine, None).verify(rows)
    again = generated(engine, 10, PROMPT + before)
    assert engine.stats.cached_tokens == len(PROMPT) + 9
    assert again == generated(Engine(model, 512), 10, PROMPT + before)


def test_follow_ups_and_changed_histories_compute_what_differs(engine, model):
    """The penalty is of the own text only, not of the one before it."""
    params = SamplingParams(repetition_penalty=1.5)
    answer = generated(engine, 20, PROMPT, params)
    follow_up = PROMPT + answer + [3, 4, 5]
    # The last token of an answer was drawn but never run through the model.
    for prompt, n_cached in (
        (follow_up, len(PROMPT) + 19),
        ([*PROMPT[:3], 77, 78], 3),
        (PROMPT[:3], 2),  # all cached: the last one runs again, for its feature
        (PROMPT[:3], 2),
    ):
        expected = generated(Engine(model, 512), 20, prompt, params)
        assert generated(engine, 20, prompt, params) == expected
        assert engine.stats.cached_tokens == n_cached
    engine.features([8] * 30)  # which overwrites the cache
    assert generated(engine, 20, PROMPT, params) == answer


def test_chunks_of_a_prompt_are_longer_on_a_gpu(model, monkeypatch):
    """What a GPU computes at once, and in which parts a draft head then sees it."""
    prompt = PROMPT * 20
    drafter = EagleDrafter(random_head(model), TreeShape(3, 3, 8))
    engine = Engine(model, 512, drafter=drafter)
    whole, lengths = generated(engine, 40, prompt), engine.stats.path_lengths
    assert engine.prefill_chunk == 256
    monkeypatch.setattr(Engine, "prefill_chunk", 31)
    show, parts = EagleDrafter.show, []

    def counted(drafter, new, end):
        parts.append(len(new.tokens))
        show(drafter, new, end)

    monkeypatch.setattr(EagleDrafter, "show", counted)
    monkeypatch.setattr("fasteagle.decoding.context.MOST_KEPT", 92)
    for n in (7, 70):
        monkeypatch.setattr("fasteagle.decoding.context.HEAD_CHUNK", n)
        other = Engine(model, 512, drafter=EagleDrafter(drafter.head, TreeShape(3, 3, 8)))
        assert generated(other, 40, prompt) == whole and other.stats.path_lengths == lengths
    assert len(prompt) == 160 and parts[-3:] == [70, 23, 66], "93 rows are shown in two parts"
    other.cached.clear()
    prefill = other.prefill_parts(prompt)
    for _ in range(4):
        next(prefill)
    prefill.close()
    assert (other.shown, len(other.cached)) == (93, 124), "broken off before the second time"
    assert other.known == 124
    assert_true_pairs(other, prompt + generated(other, 40, prompt), missing=10)
    monkeypatch.undo()
    engine.on_cpu = False
    assert engine.prefill_chunk == 1024


def test_generator_closed_or_broken_off_leaves_the_engine_usable(engine, model):
    cycles = engine.generate(PROMPT, GREEDY, 40)
    part = [next(cycles)[0] for _ in range(6)]
    cycles.close()
    assert engine.stats.finish == ""
    cycles = engine.generate(PROMPT + part, GREEDY, 40)
    next(cycles)
    with pytest.raises(KeyboardInterrupt):
        cycles.throw(KeyboardInterrupt)
    expected = generated(Engine(model, 512), 20, PROMPT)
    assert part == expected[:6]
    assert generated(engine, 20, PROMPT) == expected


def test_ends_with_eos_and_yields_it(engine):
    free = generated(engine, 10, PROMPT)
    out = generated(engine, 10, PROMPT, eos_ids=frozenset({free[4], 259}))
    assert out == free[: free.index(free[4]) + 1]
    assert engine.stats.finish == "eos"


def test_ends_at_max_new_tokens(engine):
    assert len(generated(engine, 1, PROMPT)) == 1 and engine.stats.finish == "length"
    assert engine.stats.passes == 0 and engine.stats.tau == 1.0 and engine.stats.tok_s == 0.0
    assert len(generated(engine, 7, PROMPT)) == 7 and engine.stats.passes == 6
    assert engine.stats.tau == 1.0 and engine.stats.tok_s > 0


def test_ends_when_the_context_is_full(model):
    small = Engine(model, max_seq_len=20)
    out = generated(small, 100, PROMPT)
    assert len(out) == 20 - len(PROMPT) and small.stats.finish == "context"
    assert out == generated(Engine(model, 512), 12, PROMPT)
    assert len(generated(small, 40, PROMPT + out[:-1])) == 1  # a prompt of 19 leaves room for one


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1] * 512, "512 tokens, max-seq-len 512 leaves room for 511"),
        ([1, 260], "token id 260 is outside the vocabulary of 260: use 0 .. 259"),
        ([-1], "token id -1"),
    ],
)
def test_prompts_that_cannot_run(engine, prompt, message):
    with pytest.raises(FasteagleError, match=message):
        generated(engine, 40, prompt)


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [
        (torch.bfloat16, "not finite in bfloat16 at position 8: try --precision fp32"),
        (torch.float32, "not finite in float32 .*: fetch the weights again"),
    ],
)
def test_logits_that_are_not_finite_end_one_answer_only(tiny_dir, dtype, fix):
    model = load_model(open_checkpoint(tiny_dir), dtype=dtype, device="cpu", max_seq_len=64)
    engine = Engine(model, 64)
    expected = generated(engine, 20, PROMPT)
    weight = model.blocks[0].attention.qkv.weight
    right = weight.clone()
    weight.fill_(float("nan"))
    engine.restart()
    with pytest.raises(FasteagleError, match=fix):
        generated(engine, 40, PROMPT)
    weight.copy_(right)
    assert generated(engine, 20, PROMPT) == expected


@torch.no_grad()
def test_verify_gives_each_row_its_own_path_under_a_sliding_window(tmp_path):
    hf = make_hf_model("mistral")
    hf.save_pretrained(tmp_path)
    model = load_model(open_checkpoint(tmp_path), dtype=torch.float32, device="cpu", max_seq_len=64)
    engine = Engine(model, 64)
    prompt = [*PROMPT, 1, 2, 3]
    engine.prefill(prompt)
    logits = verify_rows(engine, [50, 51, 52, 53], [-1, 0, 0, 2]).logits
    for j, rows in enumerate(([50], [50, 51], [50, 52], [50, 52, 53])):
        path = prompt + rows
        expected = hf(torch.tensor([path])).logits[0, -1]
        assert (logits[j] - expected).abs().max() < 1e-4


def test_values_that_are_not_finite_do_not_spoil_the_next_answer(engine):
    """Attention multiplies the rows that it does not see by zero, that of a draft head, too."""
    engine.use(EagleDrafter(random_head(engine.model), TreeShape(2, 2, 4)))
    expected = generated(engine, 9, PROMPT)
    for cache in engine.caches:
        cache.rows.fill_(float("nan"))
    with pytest.raises(FasteagleError, match="not finite"):
        generated(engine, 9, [*PROMPT, 7])
    assert generated(engine, 9, PROMPT) == expected
    assert all(cache.rows.isfinite().all() for cache in engine.caches)


@pytest.mark.parametrize("processor", [None, Even()])
def test_what_the_policy_learns_of_a_cycle(model, processor):
    """Nothing was shown to a draft head, and a processor takes time of its own."""
    drafter, outcomes = NgramDrafter(), []
    drafter.learn = lambda shape, outcome: outcomes.append(outcome)
    generated(Engine(model, 128, drafter=drafter), 9, [5, 6] * 4, processor=processor)
    assert outcomes and not any(outcome.extended for outcome in outcomes)
    assert {outcome.ms is None for outcome in outcomes} == {processor is not None}


def test_a_cpu_computes_no_rows_of_padding(model, monkeypatch):
    """Where a lookup finds little or nothing."""
    drafter, outcomes, rows = NgramDrafter(4), [], []
    drafter.learn = lambda shape, outcome: outcomes.append(outcome)
    run = Target.__call__

    def counted(self, tokens, *rest):
        rows.append(len(tokens))
        return run(self, tokens, *rest)

    monkeypatch.setattr(Target, "__call__", counted)
    generated(Engine(model, 128, drafter=drafter), 40, [5, 6, 7, 9, 5])
    drafted = [outcome.drafted for outcome in outcomes]
    assert len({*drafted}) > 1 and rows[-len(drafted) :] == [1 + n for n in drafted]


def test_chunks_that_come_together_have_equal_parts_of_the_time():
    stats = Stats()
    for elapsed, ready in ((0.0, 0), (1.0, 0), (2.5, 1), (2.75, 0)):
        stats.add_chunk(elapsed, ready)
        stats.passes += 1
    assert stats.cycle_seconds == [1.0, 0.875, 0.875] and stats.decode_seconds == 2.75


def test_the_parts_of_a_cycle_are_timed_alone_and_in_company(monkeypatch):
    engine = Engine(random_target(tiny_config()), 128, drafter=NgramDrafter())
    seen = []
    monkeypatch.setattr(NgramDrafter, "learn", lambda own, shape, outcome: seen.append(outcome))
    generated(engine, 20, [9, 10])
    assert len(seen) > 1 and all(one.ms >= one.draft_ms + one.verify_ms > 0 for one in seen)
    seen.clear()
    several = Batch(engine, 2)
    for key in range(2):
        begin(several, key, ([9, 10], SamplingParams(), 20))
    finished(several)
    shared = [one for one in seen if one.verify_ms is None]
    assert shared and all(one.ms is None and one.draft_ms > 0 for one in shared)
