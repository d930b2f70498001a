"""Several cycles by one call of our CPU kernels: what the same cycles do one by one."""

from __future__ import annotations

from statistics import median
from unittest import mock

import pytest
import torch

from fasteagle.batch import Batch
from fasteagle.compile import cpu_cycles
from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.compile.cpu_cycles import MOST_CYCLES, CpuRunner, NativeCycles
from fasteagle.compile.cpu_draft import NativeDraft
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.decoding.launch import End
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.drafting.thresholds import Thresholds
from fasteagle.errors import EngineError
from fasteagle.generate import Engine
from fasteagle.loading.source import quantize_head_
from fasteagle.model import KVCache, Transformer
from fasteagle.options import SamplingParams
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import GatedChain, TreeShape
from helpers import Even, eagle3_of, fused_drafter, random_head, tiny_config
from native_models import SHAPE, native_target

pytestmark = pytest.mark.usefixtures("cpu_kernels")

REACH = 7
PARAMS = [
    SamplingParams(),
    SamplingParams(0.8, seed=3),
    SamplingParams(0.9, top_k=9, top_p=0.9, min_p=0.02, seed=5),
    SamplingParams(0.7, repetition_penalty=1.2, seed=6),
    SamplingParams(repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def target():
    """A target that no test writes into."""
    return native_target(tiny_config(**SHAPE, vocab_size=60))


@pytest.fixture(autouse=True)
def any_time(monkeypatch):
    """Calls have as many cycles as they may, on a loud machine too."""
    monkeypatch.setattr(cpu_cycles, "CALL_MS", 1e9)


@pytest.fixture
def calls(monkeypatch):
    """Numbers of cycles that calls have run."""
    sizes, run = [], NativeCycles.run

    def counted(*how):
        done, alone = run(*how), len(how[2]) == 1
        sizes.append(len(done[0]))
        for one in (one for own in done for one in own):
            assert one.alone == alone == (one.verify_seconds is not None), "a time of its own"
        return done

    monkeypatch.setattr(NativeCycles, "run", counted)
    return sizes


def head_of(target: Transformer, algorithm: str = "eagle3", **changes):
    eagle3 = eagle3_of(algorithm, target.config, **changes)
    ids = torch.arange(0, 60, 2)
    head = random_head(target, draft_ids=ids, eagle3=eagle3, rope_base=10000.0)
    for linear in (head.fc, head.block.attention.out, head.block.mlp.down):
        linear.weight.data.mul_(0.1)  # not so sure of everything
    quantize_head_(head, Scheme(8, head_bits=8), native=True)
    return head


def drafter_of(target: Transformer, name: str) -> Drafter | None:
    lookup = Lookup(corpus=Corpus([list(range(20, 50))], "cpu"))
    made: Drafter
    match name.split():
        case ["plain"]:
            return None
        case ["ngram", *_]:
            made = NgramDrafter(lookup=lookup)
            made.shape = GatedChain(REACH)
        case ["fused", algorithm]:
            made = fused_drafter(head_of(target, algorithm), GatedChain(REACH), 512, lookup=lookup)
        case [algorithm]:
            made = EagleDrafter(head_of(target, algorithm), GatedChain(REACH), 512)
    made.fixed_thresholds = Thresholds((0.02,) * 8, (0.03,) * 8)
    return made


def engine_of(target: Transformer, drafter: Drafter | None = None) -> Engine:
    return Engine(target, 400, drafter=drafter, backend=CpuBackend(target))


def one_by_one(monkeypatch) -> None:
    monkeypatch.setattr(CpuRunner, "cycles", lambda self, launch: None)


def chunks_of(engine: Engine, params=PARAMS[0], n=90, eos=frozenset(), prompt=(1, 2, 3), **more):
    return list(engine.generate([*prompt], params, n, eos, **more))


def flat(chunks: list[list[int]]) -> list[int]:
    return [token for chunk in chunks for token in chunk]


DRAFTERS = ["plain", "ngram", "eagle1", "eagle3", "fused eagle1", "fused eagle3"]
CASES = [(name, PARAMS[(i + j) % 5]) for i, name in enumerate(DRAFTERS) for j in range(3)]


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_they_do_what_single_cycles_do(target, name, params, calls, monkeypatch):
    """Text, drafts, caches and all that is kept for the next cycle, bit for bit.

    The text is that of plain decoding, too.
    """
    prompts = (1, 2, 3), (4, 5, 6, 7, 4, 5)
    plain = [flat(chunks_of(engine_of(target), params, prompt=p)) for p in prompts]
    engines, records = [], []
    for alone in (False, True):
        calls.clear()
        if alone:
            one_by_one(monkeypatch)
        engine = engine_of(target, drafter_of(target, name))
        texts = [chunks_of(engine, params, prompt=p) for p in prompts]
        stats = engine.stats
        assert alone or (max(calls) == MOST_CYCLES and sum(calls) > stats.passes)
        assert stats.new_tokens == 90 and len(stats.cycle_seconds) == len(texts[1]) - 1
        assert sum(stats.cycle_seconds) == pytest.approx(stats.decode_seconds, rel=0.05)
        assert min(stats.cycle_seconds) > 0 and 0 < stats.verify_seconds < stats.decode_seconds
        assert not (alone and calls)
        engines.append(engine)
        counts = stats.passes, stats.drafted, stats.path_lengths, stats.finish
        records.append((*map(flat, texts), counts, engine.cached, engine.shown))
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


@pytest.mark.parametrize("name", ["plain", "ngram", "fused eagle3"])
def test_no_cycle_is_run_after_the_end(target, name):
    """An end of text inside a call, and a limit that it would pass."""
    engine = engine_of(target, drafter_of(target, name))
    text = flat(chunks_of(engine))
    for n in (1, 2, 5, 33):
        engine.restart()
        assert flat(chunks_of(engine, n=n)) == text[:n]
        assert int(engine.state.seq_len) - len(engine.cached) <= REACH
        assert name != "plain" or int(engine.state.seq_len) == len(engine.cached)
    last = next(i for i in range(20, 90) if text[i] not in text[:i])
    engine.restart()
    assert flat(chunks_of(engine, eos=frozenset((text[last],)))) == text[: last + 1]
    assert engine.stats.finish == "eos"
    assert int(engine.state.seq_len) - len(engine.cached) <= REACH


@pytest.mark.parametrize("name", ["plain", "eagle3", "fused eagle3"])
def test_what_follows_a_stop_is_dropped(target, name):
    """A stop that only the host knows; the next answer goes on from the text that was kept."""
    engine = engine_of(target, drafter_of(target, name))
    text = flat(chunks_of(engine))
    engine.restart()
    count = iter(range(100))
    stopped = flat(chunks_of(engine, is_last=lambda token: next(count) == 17))
    assert stopped == text[:18] and engine.stats.finish == "stop" and engine.runner.ready == 0
    if engine.drafter is not None:  # it has seen pairs of the text alone
        n, whole = engine.shown, engine_of(target, drafter_of(target, name))
        whole.prefill([1, 2, 3, *stopped])
        rows, expected = (own.drafter.caches[0].rows[:, :, 1:n] for own in (engine, whole))
        assert n > 10 and torch.allclose(rows, expected, atol=0.05)
    prompt = [1, 2, 3, *stopped, 9, 8]
    expected = flat(chunks_of(engine_of(target), prompt=prompt))
    assert flat(chunks_of(engine, prompt=prompt)) == expected
    half = engine.generate([1, 2, 3], PARAMS[0], 90)
    begun = [next(half) for _ in range(4)]
    half.close()
    assert flat(begun) == text[: len(flat(begun))]
    assert flat(chunks_of(engine)) == text


def test_cycles_of_a_call_are_as_many_as_have_time(target, calls, monkeypatch):
    engine = engine_of(target)
    chunks_of(engine)
    assert calls[0] == 1 and {*calls[1:-1]} == {MOST_CYCLES}, "the first call is timed"
    assert sum(calls) == 89
    monkeypatch.setattr(cpu_cycles, "CALL_MS", 0.0)
    chunks_of(engine, n=20)
    calls.clear()
    chunks_of(engine)
    assert {*calls} == {1}


def test_kernels_that_leave_nothing_to_compile_run_several_cycles(target, calls):
    """What the tuner compiles for a policy's chains are the kernels' own pieces."""
    engine = engine_of(target, drafter_of(target, "fused eagle3"))
    compiler = CycleCompiler(engine)
    compiler.compile()
    compiler.apply()
    assert engine.runner.compiled
    chunks_of(engine)
    assert max(calls) == MOST_CYCLES


def test_the_time_of_a_cycle_is_its_own(target):
    outcomes = []
    drafter = drafter_of(target, "fused eagle3")
    drafter.learn = lambda shape, outcome: outcomes.append(outcome)
    engine = engine_of(target, drafter)
    chunks_of(engine)
    assert len(outcomes) == engine.stats.passes
    assert all(o.draft_ms >= 0 and 0 < o.verify_ms < o.ms for o in outcomes)
    assert sum(o.ms for o in outcomes) < 1.01e3 * engine.stats.decode_seconds
    assert {o.extended for o in outcomes} == {True, False}
    assert all(bool(o.promised) <= o.extended for o in outcomes)
    by_head, by_lookup = ([o.draft_ms for o in outcomes if o.extended == own] for own in (1, 0))
    assert median(by_head) > 2 * median(by_lookup)
    assert sum(o.by_lookup for o in outcomes) > 0


def test_logits_that_are_not_finite_end_a_call():
    small = native_target(tiny_config(**SHAPE, vocab_size=60))
    engine = engine_of(small)
    text = flat(chunks_of(engine))
    engine.restart()
    odd = next(i for i in range(20, 90) if text[i] not in (1, 2, 3, *text[:i]))
    small.embedding.weight.data[text[odd]] = float("nan")
    with pytest.raises(EngineError, match=f"not finite in float32 at position {3 + odd + 1}"):
        chunks_of(engine)


def test_pairs_wait_while_the_head_pauses(target, monkeypatch):
    """More of them than are kept; then it drafts what it would have drafted one by one."""
    made = []
    for alone in (False, True):
        if alone:
            one_by_one(monkeypatch)
        drafter = drafter_of(target, "fused eagle3")
        monkeypatch.setattr(EagleDrafter, "head_gain", None)
        engine = engine_of(target, drafter)
        text = flat(chunks_of(engine, n=340))
        monkeypatch.setattr(EagleDrafter, "head_gain", 0.0)
        more = flat(chunks_of(engine, n=30, prompt=[1, 2, 3, *text]))
        made.append((text, more, engine.stats.path_lengths, engine.shown))
    assert made[0] == made[1]


def test_a_cycle_after_a_pause_reads_few_pairs(target, monkeypatch):
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
    engine = engine_of(target, drafter_of(target, "fused eagle3"))
    shown, show = [], Engine._show_pending

    def noted(engine, keep_last=True):
        shown.append(len(engine.cached) - engine.shown)
        show(engine, keep_last)

    monkeypatch.setattr(Engine, "_show_pending", noted)
    chunks_of(engine, n=300)
    assert counts[19][0] > 50 and not any(counts[19][1])
    assert shown[0] == counts[19][0] and any(counts[20][1])


def test_caches_do_not_move_back_and_forth(target, monkeypatch):
    """How many rows the next cycles may need varies from call to call."""
    sizes, resize = [], KVCache.resize

    def counted(cache, n_slots):
        before = cache.n_slots
        resize(cache, n_slots)
        if cache.n_slots != before:
            sizes.append(cache.n_slots - before)

    monkeypatch.setattr(KVCache, "resize", counted)
    engine = engine_of(target, drafter_of(target, "fused eagle3"))
    chunks_of(engine, n=380)
    assert sizes and min(sizes) > 0 and len(sizes) <= 5


def in_company(batch: Batch, starts, joins=()) -> dict[int, list[int]]:
    """Return the texts that `starts` begin at once; those in `joins` begin when 20 tokens are."""
    texts: dict[int, list[int]] = {key: [] for key in range(len(starts))}
    later = list(joins)
    for key in set(texts) - set(joins):
        batch.begin(key, [1], 100, starts[key])
    while batch.running:
        for key, chunk in batch.step():
            assert not isinstance(chunk, Exception), chunk
            texts[key] += chunk or []
        if later and max(map(len, texts.values())) > 20:
            batch.begin(key := later.pop(), [1], 100, starts[key])
    return texts


def writing(prompt, params=PARAMS[0], n=90, **more):
    return lambda own: own.generate(prompt, params, n, **more)


JOINT = [(name, PARAMS[(2 * i + j) % 5]) for i, name in enumerate(DRAFTERS) for j in range(2)]


@pytest.mark.parametrize(("name", "params"), JOINT, ids=str)
def test_texts_that_share_passes_share_calls(target, name, params, calls, monkeypatch):
    """Texts, drafts and caches are those of one pass a call, bit for bit."""
    prompts = [[1, 2, 3], [4, 5, 6, 7, 4, 5], [9, 8], [11, 30, 31, 32]]
    kinds = [params, PARAMS[0], params, PARAMS[1]]
    starts = [
        writing(p, kind, 60 + 5 * i) for i, (p, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    records = []
    for apart in (False, True):
        if apart:
            one_by_one(monkeypatch)
        calls.clear()
        batch = Batch(engine_of(target, drafter_of(target, name)), 4)
        texts = in_company(batch, starts)
        assert apart or max(calls) == MOST_CYCLES
        for i, own in enumerate(batch.engines):
            n = len(own.cached)
            kept = [own.cache.rows[:, :, :n]]
            if own.drafter is not None:
                kept += [cache.rows[:, :, : own.shown] for cache in own.drafter.caches]
            counts = own.stats.passes, own.stats.drafted, own.stats.path_lengths
            records.append((texts[i], counts, own.shown, [tensor.clone() for tensor in kept]))
    half = len(records) // 2
    for one, two in zip(records[:half], records[half:], strict=True):
        assert one[:3] == two[:3] and all(map(torch.equal, one[3], two[3]))
    alone = [
        flat(chunks_of(engine_of(target), kinds[i], 60 + 5 * i, prompt=prompts[i]))
        for i in range(4)
    ]
    assert [record[0] for record in records[:half]] == alone


def test_a_text_that_ends_ends_a_call_for_all(target, calls):
    """By a token, by its length, by what only the host knows; the others go on."""
    prompts = [[1, 2, 3], [4, 5, 6], [9, 8], [7, 7]]
    expected = [flat(chunks_of(engine_of(target), prompt=prompt)) for prompt in prompts]
    last = next(i for i in range(20, 90) if expected[1][i] not in expected[1][:i])
    count = iter(range(200))
    starts = [
        writing(prompts[0], n=33),
        writing(prompts[1], eos_ids=frozenset((expected[1][last],))),
        writing(prompts[2], is_last=lambda token: next(count) == 40),
        writing(prompts[3]),
    ]
    batch = Batch(engine_of(target), 2)
    in_company(batch, [writing(prompts[3]), starts[1]])
    ended = batch.engines[1]
    assert int(ended.state.seq_len) == len(ended.cached), "no cycle is run after the end"
    texts = in_company(Batch(engine_of(target, drafter_of(target, "fused eagle3")), 4), starts)
    ends = 33, last + 1, 41, 90
    assert [*texts.values()] == [text[:n] for text, n in zip(expected, ends, strict=True)]
    assert max(calls) == MOST_CYCLES


def test_texts_that_are_not_alike_share_single_passes(target, calls):
    """A grammar is asked before each token; a text without drafts has other cycles."""
    prompts = [[1, 2, 3], [4, 5, 6], [9, 8]]
    even = flat(chunks_of(engine_of(target), prompt=prompts[1], processor=Even()))
    expected = [flat(chunks_of(engine_of(target), prompt=prompt)) for prompt in prompts]
    expected[1] = even[:30]
    starts = [
        writing(prompts[0]),
        writing(prompts[1], n=30, processor=Even()),
        writing(prompts[2], n=50, speculate=False),
    ]
    expected[2] = expected[2][:50]
    batch = Batch(engine_of(target, drafter_of(target, "fused eagle3")), 3)
    texts = in_company(batch, starts)
    assert [*texts.values()] == expected and max(calls) == MOST_CYCLES, "the last one is alone"
    assert [bool(own.stats.drafted) for own in batch.engines] == [True, True, False]


def test_cycles_that_no_call_runs_share_passes(target, calls):
    """Trees; the last text goes on alone."""
    prompts = [[1, 2, 3], [4, 5, 6], [9, 8]]
    expected = [flat(chunks_of(engine_of(target), prompt=prompt)) for prompt in prompts]
    calls.clear()
    tree = EagleDrafter(head_of(target, "eagle1"), TreeShape(2, 2, 4), 512)
    engine = engine_of(target, tree)
    starts = [writing(prompts[i], n=(90, 20, 40)[i]) for i in range(3)]
    texts = in_company(Batch(engine, 3), starts, joins=(2,))
    assert [*texts.values()] == [expected[0], expected[1][:20], expected[2][:40]] and not calls


def test_a_text_that_is_joined_shares_the_next_pass(target):
    """Cycles that it had launched alone wait for the other text's."""
    several, passes = Batch(engine_of(target), 2), []
    run = cpu_cycles.run_queued

    def counted(runners):
        n = run(runners)
        passes.append((len(runners), n))
        return n

    with mock.patch.object(cpu_cycles, "run_queued", counted):
        several.begin(0, [1], 100, writing([1, 2, 3]))
        while len(passes) < 4:
            several.step()
        assert {*passes[1:]} == {(1, MOST_CYCLES)}
        several.begin(1, [1], 100, writing([4, 5, 6], n=40))
        several.step()
        passes.clear()
        several.step()
        several.step()
    assert [n for n, _ in passes] == [2, 2]


def test_a_call_that_fails_ends_all_its_texts(target, monkeypatch):
    batch = Batch(engine_of(target), 2)
    for key in range(2):
        batch.begin(key, [1], 100, writing([1 + key, 2, 3]))
    batch.step()
    batch.step()
    monkeypatch.setattr(NativeCycles, "run", mock.Mock(side_effect=RuntimeError("broken")))
    errors = [item for _ in range(9) for _, item in batch.step() if isinstance(item, Exception)]
    assert len(errors) == 2 and not batch.running and "broken" in str(errors[0])


def test_what_the_kernels_do_not_run_is_run_cycle_by_cycle(target):
    normed = head_of(target, "eagle3", aux_norm="all")
    draft = NativeDraft()
    assert draft.reads(head_of(target)) and normed.aux_norms and not draft.reads(normed)
    chain = EagleDrafter(normed, GatedChain(REACH), 512)
    tree = EagleDrafter(head_of(target, "eagle1"), TreeShape(2, 2, 4), 512)
    rounds = StaticTreeDrafter(head_of(target, "eagle1"), 512, ((0,), (1,)), sampled=True)
    expected = flat(chunks_of(engine_of(target)))
    for drafter in (chain, tree, rounds):
        engine = engine_of(target, drafter)
        chunks = chunks_of(engine)
        assert flat(chunks) == expected and len(chunks) == engine.stats.passes + 1
        # Without a draft its plain cycles may be run together.
        assert flat(chunks_of(engine, speculate=False)) == expected
    chunks = chunks_of(engine_of(target), processor=Even())
    assert {len(chunk) for chunk in chunks} == {1} and not any(t % 2 for t in flat(chunks))


def test_none_is_run_after_the_last_token(target, calls):
    engine = engine_of(target, drafter_of(target, "ngram"))
    chunks_of(engine)  # calls are of several cycles from now on
    for n in range(29, 43):
        engine.restart()
        calls.clear()
        chunks = chunks_of(engine, n=n)
        assert sum(calls) == len(chunks) - 1, "the first token comes with the prompt"
        assert max(calls) > 1 and len(flat(chunks)) == n > len(chunks), "drafts are accepted"


def test_an_end_that_is_none_only_ends_the_call(target):
    """The host decides where an answer ends: cycles after a token of `ends` run with the next."""
    text = flat(chunks_of(engine_of(target)))
    engine = engine_of(target)
    chunks_of(engine, n=20)  # calls are of several cycles from now on
    engine.restart()
    chunks = engine.generate([1, 2, 3], PARAMS[0], 90)
    first = next(chunks)
    engine.runner.end = End(text[3:4])
    assert flat([first, *chunks]) == text
