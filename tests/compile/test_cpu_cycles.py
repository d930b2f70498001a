"""Several cycles by one call of our CPU kernels: what the same cycles do one by one."""

from __future__ import annotations

import itertools
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from fasteagle.compile import cpu_cycles
from fasteagle.compile.cpu_blocks import MAX_ROWS
from fasteagle.compile.cpu_cycles import MOST_CYCLES, CpuRunner, NativeCycles
from fasteagle.compile.cpu_draft import NativeDraft
from fasteagle.decoding.cycle import EAGER
from fasteagle.decoding.launch import Done, End, Launch, variant_of
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.policy import Outcome
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.errors import EngineError
from fasteagle.generate import Engine
from fasteagle.model import KVCache
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import GatedChain, TreeShape
from helpers import Even, compile_cycles, tiny_config
from native_cycles import (
    DRAFTERS,
    PARAMS,
    REACH,
    chunks_of,
    drafter_of,
    engine_of,
    flat,
    head_of,
    one_by_one,
)
from native_models import SHAPE, native_target

pytestmark = pytest.mark.usefixtures("cpu_kernels", "any_time")


CASES = [(name, PARAMS[(i + j) % 5]) for i, name in enumerate(DRAFTERS) for j in range(3)]


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_they_do_what_single_cycles_do(native, name, params, calls, monkeypatch):
    """Text, drafts, caches and all that is kept for the next cycle, bit for bit.

    The text is that of plain decoding, too.
    """
    prompts = (1, 2, 3), (4, 5, 6, 7, 4, 5)
    plain = [flat(chunks_of(engine_of(native), params, prompt=p)) for p in prompts]
    engines, records = [], []

    def learn(drafter, shape, outcome):
        learned.append(outcome._replace(ms=None, draft_ms=None, verify_ms=None))

    monkeypatch.setattr(EagleDrafter, "learn", learn)
    for alone in (False, True):
        calls.clear()
        learned: list[Outcome] = []
        if alone:
            one_by_one(monkeypatch)
        engine = engine_of(native, drafter_of(native, name))
        texts = [chunks_of(engine, params, prompt=p) for p in prompts]
        stats = engine.stats
        assert alone or (max(calls) == MOST_CYCLES and sum(calls) > stats.passes)
        assert stats.new_tokens == 90 and len(stats.cycle_seconds) == len(texts[1]) - 1
        # The machine may take its time over the first token, too.
        assert 0.5 < sum(stats.cycle_seconds) / stats.decode_seconds < 1.001
        assert min(stats.cycle_seconds) > 0 and 0 < stats.verify_seconds < stats.decode_seconds
        assert not (alone and calls)
        engines.append(engine)
        counts = stats.passes, stats.drafted, stats.path_lengths, stats.finish
        records.append((*map(flat, texts), counts, engine.cached, engine.shown, learned))
    assert records[0] == records[1] and [*records[0][:2]] == plain
    one, two = engines
    n = len(one.cached)
    assert torch.equal(one.cache.rows[:, :, :n], two.cache.rows[:, :, :n])
    if one.drafter is not None:
        assert one.stats.drafted > 10
        for mine, its in zip(one.drafter.caches, two.drafter.caches, strict=True):
            assert torch.equal(mine.rows[:, :, : one.shown], its.rows[:, :, : one.shown])
        for mine, its in zip(one.drafter.advanced, two.drafter.advanced, strict=True):
            assert torch.equal(mine, its)


def test_drafts_have_the_noise_of_the_target_only_where_they_share_it(native, monkeypatch):
    drafted = []
    for noise, alone in (("shared", False), ("none", False), ("none", True)):
        if alone:
            one_by_one(monkeypatch)
        engine = engine_of(native, drafter_of(native, "eagle1"))
        engine.drafter.noise = noise
        chunks_of(engine, PARAMS[1])
        drafted.append((engine.stats.drafted, engine.stats.path_lengths))
    assert drafted[0] != drafted[1] == drafted[2]


@pytest.mark.parametrize("name", ["plain", "ngram", "fused eagle3"])
def test_no_cycle_is_run_after_the_end(native, name):
    """An end of text inside a call, and a limit that it would pass."""
    engine = engine_of(native, drafter_of(native, name))
    text = flat(chunks_of(engine))
    for n in (1, 2, 5, 33):
        engine.restart()
        assert flat(chunks_of(engine, n=n)) == text[:n]
        assert int(engine.state.seq_len) - len(engine.cached) <= REACH
        assert name != "plain" or int(engine.state.seq_len) == len(engine.cached)
    engine.restart()
    assert flat(chunks_of(engine, n=10**30))[:90] == text  # more than fits into 64 bits
    last = next(i for i in range(20, 90) if text[i] not in text[:i])
    engine.restart()
    assert flat(chunks_of(engine, eos=frozenset((text[last],)))) == text[: last + 1]
    assert engine.stats.finish == "eos"
    assert int(engine.state.seq_len) - len(engine.cached) <= REACH
    assert name != "plain" or int(engine.state.seq_len) == len(engine.cached)


@pytest.mark.parametrize("name", ["plain", "eagle3", "fused eagle3"])
def test_what_follows_a_stop_is_dropped(native, name):
    """A stop that only the host knows; the next answer goes on from the text that was kept."""
    engine = engine_of(native, drafter_of(native, name))
    text = flat(chunks_of(engine))
    engine.restart()
    count = iter(range(100))
    stopped = flat(chunks_of(engine, is_last=lambda token: next(count) == 17))
    assert stopped == text[:18] and engine.stats.finish == "stop" and engine.runner.ready == 0
    if engine.drafter is not None:  # it has seen pairs of the text alone
        n, whole = engine.shown, engine_of(native, drafter_of(native, name))
        whole.prefill([1, 2, 3, *stopped])
        whole._show_kept(whole.cached)
        rows, expected = (own.drafter.caches[0].rows[:, :, 1:n] for own in (engine, whole))
        assert n > 10 and torch.allclose(rows, expected, atol=0.05)
    prompt = [1, 2, 3, *stopped, 9, 8]
    expected = flat(chunks_of(engine_of(native), prompt=prompt))
    assert flat(chunks_of(engine, prompt=prompt)) == expected
    half = engine.generate([1, 2, 3], PARAMS[0], 90)
    begun = [next(half) for _ in range(4)]
    half.close()
    assert flat(begun) == text[: len(flat(begun))]
    assert flat(chunks_of(engine)) == text


def test_cycles_of_a_call_are_as_many_as_have_time(native, calls, monkeypatch):
    engine = engine_of(native)
    chunks_of(engine)
    assert calls[0] == 1 and {*calls[1:-1]} == {MOST_CYCLES}, "the first call is timed"
    assert sum(calls) == 89
    monkeypatch.setattr(cpu_cycles, "CALL_MS", 0.0)
    chunks_of(engine, n=20)
    calls.clear()
    chunks_of(engine)
    assert {*calls} == {1}
    monkeypatch.setattr(cpu_cycles, "CALL_MS", 24.0)
    engine.runner.took([Done([], 0, 0, None, None, ms=ms) for ms in (3.0, 4.0, 5.0)])
    assert engine.runner.at_once == 6


def test_a_call_runs_cycles_of_one_variant(native):
    """The policy may decide otherwise while some wait for other texts."""
    engine = engine_of(native, drafter_of(native, "ngram"))
    specs = (engine.spec(shape, SamplingMode()) for shape in (None, engine.drafter.shape))
    plain, drafted = (Launch(spec, engine.drafter, None) for spec in specs)
    for queued, n in (([plain, plain, drafted, plain], 2), ([drafted, plain], 1), ([], 0)):
        engine.runner.queued[:] = queued
        assert engine.runner.leading() == n
    engine.runner.queued[:], engine.runner.at_once = [plain, drafted], MOST_CYCLES
    assert engine.runner.take() is plain and engine.runner.at_once == 1, "nothing else is ahead"


def test_no_call_runs_more_texts_than_a_pass_has_rows():
    """As many conversations may be written at once for training."""
    runners = [SimpleNamespace(leading=lambda: 1)] * (MAX_ROWS + 1)
    assert cpu_cycles.run_queued(runners) == 0


def test_kernels_that_leave_nothing_to_compile_run_several_cycles(native, calls):
    """What the tuner compiles for a policy's chains are the kernels' own pieces."""
    engine = engine_of(native, drafter_of(native, "fused eagle3"))
    compile_cycles(engine)
    assert engine.runner.compiled
    chunks_of(engine)
    assert max(calls) == MOST_CYCLES


def test_other_pieces_end_calls_of_several_cycles(native):
    engine = engine_of(native)
    spec = engine.spec(None, SamplingMode())
    assert engine.runner.cycles(Launch(spec, None, None)) is not None
    engine.runner.use_compiled({variant_of(None, spec): EAGER})
    assert engine.runner.cycles(Launch(spec, None, None)) is None


def test_the_time_of_a_cycle_is_its_own(native):
    outcomes = []
    drafter = drafter_of(native, "fused eagle3")
    drafter.learn = lambda shape, outcome: outcomes.append(outcome)
    engine = engine_of(native, drafter)
    chunks_of(engine)
    assert len(outcomes) == engine.stats.passes
    assert all(o.draft_ms >= 0 < o.verify_ms < o.ms - o.draft_ms for o in outcomes)
    assert sum(o.ms for o in outcomes) < 1.01e3 * engine.stats.decode_seconds
    assert {o.extended for o in outcomes} == {True, False}
    assert all(bool(o.promised) <= o.extended for o in outcomes)
    by_head, by_lookup = ([o.draft_ms for o in outcomes if o.extended == own] for own in (1, 0))
    assert median(by_head) > 2 * median(by_lookup)
    assert sum(o.by_lookup for o in outcomes) > 0


def test_cycles_that_run_one_by_one_before_the_first_is_read_have_their_own_times(
    native, monkeypatch
):
    """They had been launched before other code was put in place."""
    engine = engine_of(native)
    chunks_of(engine, n=9)
    one_by_one(monkeypatch)
    runner, launch = engine.runner, Launch(engine.spec(None, SamplingMode()), None, None)
    runner.queued[:] = [launch] * 3
    done = [runner.read() for _ in range(3)]
    assert not runner.queued and all(one.ms > 1e3 * one.verify_seconds > 0 for one in done)


def test_a_call_is_shared_out_among_its_cycles(native, monkeypatch):
    """With what is no part of a cycle: here each call takes a ms."""
    times = (i / 1e3 for i in itertools.count())
    monkeypatch.setattr(cpu_cycles, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    took, calls = CpuRunner.took, []

    def noting(self, done):
        calls.append(done)
        took(self, done)

    monkeypatch.setattr(CpuRunner, "took", noting)
    chunks_of(engine_of(native))
    assert max(map(len, calls)) == MOST_CYCLES
    assert all(sum(one.ms for one in done) == pytest.approx(1.0) for done in calls)


def test_logits_that_are_not_finite_end_a_call():
    small = native_target(tiny_config(**SHAPE, vocab_size=60))
    engine = engine_of(small)
    text = flat(chunks_of(engine))
    engine.restart()
    odd = next(i for i in range(20, 90) if text[i] not in (1, 2, 3, *text[:i]))
    small.embedding.weight.data[text[odd]] = float("nan")
    with pytest.raises(EngineError, match=f"not finite in float32 at position {3 + odd + 1}"):
        chunks_of(engine)


def test_pairs_wait_while_the_head_pauses(native, monkeypatch):
    """More of them than are kept; then it drafts what it would have drafted one by one."""
    made = []
    for alone in (False, True):
        if alone:
            one_by_one(monkeypatch)
        drafter = drafter_of(native, "fused eagle3")
        monkeypatch.setattr(EagleDrafter, "head_gain", None)
        engine = engine_of(native, drafter)
        text = flat(chunks_of(engine, n=340))
        monkeypatch.setattr(EagleDrafter, "head_gain", 0.0)
        more = flat(chunks_of(engine, n=30, prompt=[1, 2, 3, *text]))
        made.append((text, more, engine.stats.path_lengths, engine.shown))
    assert made[0] == made[1]


def test_a_cycle_after_a_pause_reads_few_pairs(native, monkeypatch):
    """What the head has missed in a pause is no part of what its chain costs."""
    counts, run = [], NativeCycles.run

    def counted(cycles, how, texts, ends, n):
        done = run(cycles, how, texts, ends, n)
        counts.append((int(texts[0].state.count), [one.extended for one in done[0]]))
        if len(counts) == 20:
            monkeypatch.setattr(EagleDrafter, "head_gain", 0.0)
        return done

    monkeypatch.setattr(EagleDrafter, "head_gain", None)
    monkeypatch.setattr(NativeCycles, "run", counted)
    engine = engine_of(native, drafter_of(native, "fused eagle3"))
    shown, keep = [], Engine._keep_pending

    def noted(engine):
        shown.append(len(engine.cached) - engine.known)
        keep(engine)

    monkeypatch.setattr(Engine, "_keep_pending", noted)
    chunks_of(engine, n=300)
    assert counts[19][0] > 50 and not any(counts[19][1])
    assert shown[0] == counts[19][0] and any(counts[20][1])


def test_caches_do_not_move_back_and_forth(native, monkeypatch):
    """How many rows the next cycles may need varies from call to call, and a new text is short."""
    sizes, resize = [], KVCache.resize

    def counted(cache, n_slots, **how):
        before = cache.n_slots
        resize(cache, n_slots, **how)
        if cache.n_slots != before:
            sizes.append(cache.n_slots - before)

    monkeypatch.setattr(KVCache, "resize", counted)
    engine = engine_of(native, drafter_of(native, "fused eagle3"))
    chunks_of(engine, n=380)
    assert sizes and min(sizes) > 0 and len(sizes) <= 5
    sizes.clear()
    chunks_of(engine, n=30, prompt=[9, 8])
    assert not sizes and engine.cached[:2] == [9, 8]


def test_what_the_kernels_do_not_run_is_run_cycle_by_cycle(native):
    normed = head_of(native, "eagle3", aux_norm="all")
    draft = NativeDraft()
    assert draft.reads(head_of(native)) and normed.aux_norms and not draft.reads(normed)
    chain = EagleDrafter(normed, GatedChain(REACH))
    tree = EagleDrafter(head_of(native, "eagle1"), TreeShape(2, 2, 4))
    rounds = StaticTreeDrafter(head_of(native, "eagle1"), ((0,), (1,)), sampled=True)
    expected = flat(chunks_of(engine_of(native)))
    long = NgramDrafter(lookup=Lookup(corpus=Corpus([expected], "cpu")))
    long.shape = GatedChain(MAX_ROWS)
    for drafter in (chain, tree, rounds, long):
        engine = engine_of(native, drafter)
        chunks = chunks_of(engine)
        assert flat(chunks) == expected and len(chunks) == engine.stats.passes + 1
        # Without a draft its plain cycles may be run together.
        assert flat(chunks_of(engine, speculate=False)) == expected
    chunks = chunks_of(engine_of(native), processor=Even())
    assert {len(chunk) for chunk in chunks} == {1} and not any(t % 2 for t in flat(chunks))


def test_none_is_run_after_the_last_token(native, calls):
    engine = engine_of(native, drafter_of(native, "ngram"))
    chunks_of(engine)  # calls are of several cycles from now on
    for n in range(29, 43):
        engine.restart()
        calls.clear()
        chunks = chunks_of(engine, n=n)
        assert sum(calls) == len(chunks) - 1, "the first token comes with the prompt"
        assert max(calls) > 1 and len(flat(chunks)) == n > len(chunks), "drafts are accepted"


def test_an_end_that_is_none_only_ends_the_call(native):
    """The host decides where an answer ends: cycles after a token of `ends` run with the next."""
    text = flat(chunks_of(engine_of(native)))
    engine = engine_of(native)
    chunks_of(engine, n=20)  # calls are of several cycles from now on
    engine.restart()
    chunks = engine.generate([1, 2, 3], PARAMS[0], 90)
    first = next(chunks)
    engine.runner.end = End(text[3:4])
    assert flat([first, *chunks]) == text


def test_cycles_that_wait_are_run_before_a_single_one(native):
    """Results come in the order of the launches."""
    shape = TreeShape(2, 2, 4)
    engine = engine_of(native, EagleDrafter(head_of(native, "eagle1"), shape))
    answer = engine.generate([1, 2, 3], PARAMS[0], 9)
    next(answer)
    engine.reserve(20, rows=shape.rows, width=8)
    for own in (None, shape):
        engine.runner.launch(engine.spec(own, SamplingMode()), engine.drafter)
    assert [engine.runner.read().drafted for _ in range(2)] == [0, shape.nodes]


@pytest.mark.parametrize(("name", "reads"), [("eagle3", True), ("ngram", False)])
def test_cycles_that_are_dropped_say_whether_the_head_has_read_pairs(native, name, reads):
    """Those that are kept for it have been replaced then."""
    engine = engine_of(native, drafter_of(native, name))
    chunks_of(engine, n=9)
    runner, spec = engine.runner, engine.spec(GatedChain(REACH), SamplingMode())
    runner.end = End()
    for _ in range(3):
        runner.launch(spec, engine.drafter)
    runner.read()
    assert runner.ready and runner.drop([spec, spec]) == reads and not runner.ready
