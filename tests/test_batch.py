"""Several texts written at once: the tokens of each are those that it gets alone."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from fasteagle import batch, model
from fasteagle.batch import Batch, NoRoomError
from fasteagle.decoding import context
from fasteagle.drafting.base import Tuning
from fasteagle.drafting.costs import Costs
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ladder import DEFAULT_RANKS
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.policy import REACH, Policy
from fasteagle.drafting.thresholds import LONGEST
from fasteagle.generate import Engine
from fasteagle.loading.open import open_model
from fasteagle.loading.source import quantize_head_
from fasteagle.options import RuntimeOptions, SamplingParams
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import FusedShape, GatedChain, TreeShape
from helpers import (
    finished,
    fused_drafter,
    generated,
    random_head,
    random_target,
    rest_slow,
    tiny_config,
)
from simulated_machine import CARD, policy_of

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
    return [generated(engine, n, prompt, params, eos_ids=EOS) for prompt, params, n in wanted]


def together(engine: Engine, size: int, wanted) -> list[list[int]]:
    """Answer as a caller does: a text begins wherever one has ended."""
    several, waiting = Batch(engine, size), list(enumerate(wanted))
    texts, ended = {key: [] for key, _ in waiting}, set()
    while waiting or several.running:
        while waiting and several.has_room:
            begin(several, *waiting.pop(0))
        for key, new in several.step():
            texts[key] += new or []
            ended |= {key} if new is None else set()
    assert ended == set(texts)
    return [texts[key] for key in sorted(texts)]


def begin(several: Batch, key: int, job) -> None:
    prompt, params, limit = job
    several.begin(
        key, prompt, len(prompt) + limit, lambda own: own.generate(prompt, params, limit, EOS)
    )


@pytest.mark.parametrize(
    ("name", "size"), [("gqa", 1), ("gqa", 8), ("mha", 3), ("window", 8), ("qwen3", 3)]
)
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


@pytest.mark.parametrize("seed", rest_slow([*range(40)], 16))
def test_any_company_leaves_a_text_as_it_is(seed, native, tmp_path):
    """Answers begin at any time, between any others, and some are given up."""
    engine, expected = [*native.values()][seed % 3]
    engine.use(fused(engine, tmp_path) if seed % 2 else None)
    choose = random.Random(seed)
    size = choose.choice([1, 2, 3, 4, 8])
    several, left, texts = Batch(engine, size), list(range(len(expected))), {}
    choose.shuffle(left)
    cancelled = set(left[:2])
    wanted = list(jobs(len(expected), engine.model.config.vocab_size))
    while left or several.running:
        while left and several.has_room and choose.random() < 0.5:
            key = left.pop()
            texts[key] = []
            begin(several, key, wanted[key])
        for key, new in several.step():
            texts[key] += new or []
            if key in cancelled and new is not None:
                cancelled.remove(key)
                several.end(key)
                texts[key] = expected[key]
    assert texts == dict(enumerate(expected))
    if seed % 2 and size > 1:
        drafters = [engine.drafter for engine in several.engines]
        assert len({id(drafter.cache) for drafter in drafters}) == len(drafters)
        assert all(drafter.company is None for drafter in drafters)


def test_trees_of_a_fixed_size_are_chosen_together(native, tmp_path):
    """Rows cost nothing by these costs: first plain passes are timed, then all have trees."""
    engine, expected = native["int8", "auto"]
    sizes = [FusedShape(0, 1, 3, 3), FusedShape(2, 2, 5, 3)]
    drafter = fused_drafter(random_head(engine.model), sizes[0])
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    costs = Costs({1: 4.0, 2: 4.1, 32: 4.2}, *[{1: 0.01, 2: 0.01}] * 2, 0.1, 0.1, 0.02)
    drafter.policy = Policy(costs, DEFAULT_RANKS, sizes, head=True, lookup=True)
    engine.use(drafter)
    several, texts, shapes = Batch(engine, 3), dict.fromkeys(range(9), ()), set()
    end_passes = several._company.end_passes
    several._company.end_passes = lambda n, ms: end_passes(n, 4.1 * n)  # as the costs say
    left = list(enumerate(jobs(len(expected), engine.model.config.vocab_size)))
    while left or several.running:
        while left and several.has_room:
            begin(several, *left.pop(0))
        if len(several.running) > 1:
            shapes.add(drafter.next_shape())
        for key, new in several.step():
            texts[key] += tuple(new or ())
    assert [list(text) for text in texts.values()] == expected
    assert None in shapes and shapes & set(sizes)


def fused(engine: Engine, folder) -> EagleDrafter:
    """A drafter of a random draft head and the lookup, whose policy has costs."""
    head = random_head(engine.model)
    quantize_head_(head, Scheme(8, head_bits=8), native=True)
    drafter = fused_drafter(head, GatedChain(REACH))
    drafter.tuning = Tuning(folder / "costs.json", DEFAULT_RANKS)
    costs = Costs({1: 4.0, 2: 4.1, 32: 5.6}, {}, {}, 0.1, 0.1, 0.02, {1: 0.01, LONGEST: 0.08})
    drafter.policy = Policy(costs, DEFAULT_RANKS, [GatedChain(REACH)], head=True, lookup=True)
    return drafter


@pytest.fixture(scope="module")
def native(tiny_dir):
    """Engine on our kernels, with texts written alone, by precision of weights and cache."""
    made = {}
    for quant, kv in (("int4", "auto"), ("int8", "auto"), ("int4", "int8")):
        options = RuntimeOptions(device="cpu", quant=quant, kv=kv)
        engine = open_model(str(tiny_dir)).prepared(options).engine()
        assert "passes, chains and commits by C++ kernels" in engine.backend.describe()
        made[quant, kv] = engine, alone(engine, jobs(9, engine.model.config.vocab_size))
    return made


def test_what_several_answers_share_is_compiled_once_before_the_second(monkeypatch):
    engine, running = Engine(random_target(tiny_config()), 128), []
    monkeypatch.setattr(engine, "compile_shared", lambda: running.append(several.running))
    several = Batch(engine, 3)
    for key in range(3):
        begin(several, key, ([9 + key], SamplingParams(), 3))
    assert running == [[0]] and not several.has_room
    several.close()
    # Each engine may be used alone again.
    assert not any(own.runner.waits or own.runner.accompanied for own in several.engines)


def test_each_engine_drafts_as_the_first_one_does_now():
    """A text goes on where most of it is cached, with the drafter in use."""
    engine = Engine(random_target(tiny_config()), 128)
    several = Batch(engine, 2)
    for drafter in (NgramDrafter(), NgramDrafter(), None):
        engine.use(drafter)
        for key in range(2):
            begin(several, key, ([9 + key] * 6, SamplingParams(), 3))
        # Its size is fixed: there is no policy that could decide for all.
        assert drafter is None or drafter.company is None
        finished(several)
        origins = [own.drafter and own.drafter.origin for own in several.engines]
        assert origins == [drafter and drafter.origin] * 2
    for i in (1, 0):
        begin(several, 2, ([9 + i] * 6 + [30], SamplingParams(), 3))
        assert several._running[2].engine is several.engines[i]
        finished(several)


def test_each_engine_follows_the_policy_that_the_first_one_has_now():
    """Costs may be measured after the others were made."""
    several = Batch(Engine(random_target(tiny_config()), 128, drafter=NgramDrafter()), 2)
    for policy in (None, policy_of(CARD, TreeShape(3, 1, 3))):
        several.engines[0].drafter.policy = policy
        for key in range(2):
            begin(several, key, ([9 + key] * 6, SamplingParams(), 3))
        assert [own.drafter.policy for own in several.engines] == [policy] * 2
        finished(several)


def test_the_time_between_two_steps_is_not_that_of_a_cycle(monkeypatch):
    engine = Engine(random_target(tiny_config()), 128, drafter=NgramDrafter())
    ms = []
    monkeypatch.setattr(engine.drafter, "learn", lambda shape, outcome: ms.append(outcome.ms))
    several = Batch(engine, 2)
    begin(several, 0, ([9, 10], SamplingParams(), 20))
    while len(ms) < 3:
        several.step()
        time.sleep(0.5)
    assert min(ms) < 400


def test_decisions_are_for_all_that_are_under_way(native, tmp_path):
    engine, _ = native["int8", "auto"]
    engine.use(fused(engine, tmp_path))
    several, expected = Batch(engine, 3), []
    several._company.expect = expected.append
    for key in range(3):
        begin(several, key, ([9, 10], SamplingParams(), 30))
    several.close()
    assert expected == [1, 2, 3]


def test_the_time_of_a_shared_pass_is_not_that_of_the_answer_that_remains(native, tmp_path):
    engine, _ = native["int8", "auto"]
    engine.use(fused(engine, tmp_path))
    several, seen, learn = Batch(engine, 2), [], engine.drafter.policy.learn
    engine.drafter.policy.learn = lambda *cycle: (seen.append(cycle[1]), learn(*cycle))
    begin(several, 0, ([9, 10], SamplingParams(), 30))
    begin(several, 1, ([9, 11], SamplingParams(), 60))
    finished(several)
    shared = [outcome.ms for outcome in seen if outcome.verify_ms is None]
    assert shared and not any(shared) and len(seen) > len(shared)


@pytest.mark.parametrize("awaited", [True, False])
def test_prompts_go_before_answers_that_nobody_waits_for(awaited):
    target = random_target(tiny_config())
    target.init_rope(4096, "cpu")
    several, texts = Batch(Engine(target, 4096), 2), {0: [], 1: []}
    prompts = [9] * 5, [9, 10, 11] * 1000
    job = SamplingParams(), 40, EOS

    def start(key, limit, awaited):
        several.begin(
            key, prompts[key], limit, lambda own: own.generate(prompts[key], *job), awaited=awaited
        )

    start(0, 64, awaited)
    while len(texts[0]) < 5:
        texts[0] += [token for _, new in several.step() for token in new or []]
    start(1, 4096, awaited=False)
    meanwhile = 0
    while not texts[1]:
        for key, new in several.step():
            texts[key] += new or []
            meanwhile += len(new or []) if key == 0 else 0
    assert (meanwhile > 0) == awaited


@pytest.mark.parametrize("awaited", [True, False])
def test_prompts_are_computed_in_the_order_in_which_they_came(awaited):
    several, order = Batch(Engine(random_target(tiny_config()), 128), 3), []
    start = lambda own: own.generate([9], SamplingParams(), 100)  # noqa: E731
    several.begin(0, [9], 128, start, awaited=awaited)
    several.step()
    for key in (1, 2):
        begin(several, key, ([9 + key], SamplingParams(), 3))
    while len(order) < 2:
        order += [key for key, _ in several.step() if key and key not in order]
    assert order == [1, 2] and several.running[0] == 0
    several.close()


def test_caches_grow_with_the_longest_text(monkeypatch):
    monkeypatch.setattr(model, "KEPT_SLOTS", 0)
    config = tiny_config(max_seq_len=512)
    engine = Engine(random_target(config), 512)
    wanted = [
        ([9] * 5, SamplingParams(1.0, seed=1), 30),
        (list(range(8, 58)) * 5, SamplingParams(1.0, seed=2), 30),  # ends beyond 256
        ([10] * 300, SamplingParams(), 30),
        ([11] * 510, SamplingParams(1.0, seed=3), 30),  # two tokens fit after it
    ]
    expected = alone(engine, wanted)
    assert len(expected[3]) == 2 and engine.cache.n_slots == 512
    assert alone(engine, wanted[:1]) == expected[:1] and engine.cache.n_slots == 256
    assert together(engine, 2, wanted) == expected


def test_memory_that_is_not_there(monkeypatch):
    engine = Engine(random_target(tiny_config()), 512)
    monkeypatch.setattr(batch, "available_bytes", lambda device: 1000)
    several = Batch(engine, 2)
    with pytest.raises(NoRoomError, match="a text of 305 tokens .* need .* fewer at once"):
        begin(several, 0, ([9] * 300, SamplingParams(), 5))
    assert not several.running and several.has_room
    # There is room for one such text, which has begun, and not for two.
    monkeypatch.setattr(batch, "available_bytes", lambda device: 60 * engine.slot_bytes)
    begin(several, 0, ([9] * 300, SamplingParams(), 5))
    with pytest.raises(NoRoomError):
        begin(several, 1, ([9] * 300, SamplingParams(), 5))
    several.close()


def test_idle_engines_give_their_memory_back(monkeypatch):
    target = random_target(tiny_config())
    target.init_rope(1024, "cpu")
    engine = Engine(target, 1024)
    jobs = [([9 + i] * n, SamplingParams(), 5) for i, n in enumerate((300, 300, 700))]
    expected = alone(engine, jobs[2:])
    engine.give_back()
    several = Batch(engine, 2)
    for key in range(2):
        begin(several, key, jobs[key])
    finished(several)
    caches = [own.cache for own in several.engines]
    assert [cache.n_slots for cache in caches] == [512, 512]
    slot = caches[0].rows[:, :, :1].nbytes
    free = lambda device: (1030 - sum(cache.n_slots for cache in caches)) * slot  # noqa: E731
    monkeypatch.setattr(batch, "available_bytes", free)
    with pytest.raises(NoRoomError):
        begin(several, 2, ([9] * 900, SamplingParams(), 5))
    begin(several, 2, jobs[2])
    assert all(len(own.cached) < own.cache.n_slots for own in several.engines)
    assert [*finished(several).values()] == expected


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


def test_prompts_take_no_more_time_than_the_answers_meanwhile(monkeypatch):
    """A part of a prompt takes as long as three passes: three passes lie between two parts."""
    engine, seconds, parts = Engine(random_target(tiny_config()), 128), [0.0], []
    monkeypatch.setattr(batch.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(context, "PREFILL_CHUNK", 8)
    several, passes = Batch(engine, 2), []
    several.begin(0, [9, 10], 128, lambda own: own.generate([9, 10], SamplingParams(), 100))
    several.step()
    run, run_together = Engine._run, batch.run_together

    def timed(own, *arguments):
        parts.append(len(passes))
        seconds[0] += 3.0
        return run(own, *arguments)

    def timed_together(runners):
        passes.append(len(runners))
        seconds[0] += 1.0
        run_together(runners)

    monkeypatch.setattr(Engine, "_run", timed)
    monkeypatch.setattr(batch, "run_together", timed_together)
    begin(several, 1, ([11] * 64, SamplingParams(), 2))
    while len(parts) < 8:
        several.step()
    assert [after - before for before, after in itertools.pairwise(parts)] == [3] * 7
    while not several.has_room:
        several.step()
    several.step()
    passes.clear()
    begin(several, 2, ([12], SamplingParams(), 2))
    while len(parts) < 9:
        several.step()
    assert parts[-1] == 1  # the time of the last prompt does not count
    several.close()
