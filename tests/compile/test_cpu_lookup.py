"""Looked-up chains in our CPU kernels: against plain Python, and inside whole answers."""

from __future__ import annotations

import random

import pytest
import torch

from fasteagle.compile.costs import costs_of, load_costs
from fasteagle.compile.cpu_draft import NativeDraft
from fasteagle.compile.cpu_pass import native_pieces
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.compile.measurement import Measurement
from fasteagle.decoding.cycle import EAGER
from fasteagle.drafting.base import Tuning
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.plan import DEFAULT_RANKS, Costs
from fasteagle.drafting.sure_chain import LONGEST, MAX_CHAIN, REACH, ChainPlan, lookup_prior
from fasteagle.generate import Engine
from fasteagle.loading.source import quantize_head_
from fasteagle.options import SamplingParams
from fasteagle.quant import cpu_build
from fasteagle.quant.scheme import Scheme
from fasteagle.sampling import DrawKind
from fasteagle.shapes import SureChain
from helpers import eagle3_of, random_head, tiny_config
from native_models import SHAPE, native_target

PARAMS = [SamplingParams(), SamplingParams(0.7, seed=4), SamplingParams(0.8, top_p=0.9, seed=2)]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    cpu_build.load()


class Twin:
    """What the kernel does, in plain Python; text positions count from 0."""

    def __init__(self, longest: int = 8, reach: int = REACH) -> None:
        self.longest, self.reach = longest, reach
        self.tried, self.right = lookup_prior().double().unbind()
        self.kept: tuple[int, int, int, list[int]] = (0, 0, 0, [])

    def cell(self, size: int, depth: int) -> tuple[int, int]:
        return min(size, 8) - 1, min(depth, 8) - 1

    def learn(self, text: list[int]) -> None:
        at, root, size, tokens = self.kept
        if at >= len(text) or len(text) - 1 > at + self.reach + 1 or text[at] != root:
            return
        for i, token in enumerate(tokens):
            if at + 1 + i >= len(text):
                return
            cell = self.cell(size, i + 1)
            self.tried[cell] += 1
            self.right[cell] += text[at + 1 + i] == token
            share = min(1.0, 128 / float(self.tried[cell]))
            self.tried[cell] *= share
            self.right[cell] *= share
            if text[at + 1 + i] != token:
                return

    def find(self, text: list[int]) -> tuple[int, list[int]]:
        last, best = len(text) - 1, (0, 0)
        for end in range(last):
            size = 0
            while size < min(self.longest, end + 1) and text[end - size] == text[last - size]:
                size += 1
            best = max(best, (size, end))
        size, end = best
        if not size:
            return 0, []
        return size, [text[end + 1 + i % (last - end)] for i in range(self.reach)]

    def __call__(self, text: list[int]) -> tuple[list[int], list[float]]:
        self.learn(text)
        size, tokens = self.find(text)
        self.kept = (len(text) - 1, text[-1], size, tokens)
        paths, path = [], 1.0
        for depth in range(1, len(tokens) + 1):
            cell = self.cell(size, depth)
            path *= min(1.0, max(1e-3, float(self.right[cell] / self.tried[cell])))
            paths.append(path)
        return tokens, paths


def looked_up(text: list[int], table, kept, corpus=(), keep=0.0):
    # Behind the text are left-overs, which must not be read.
    memory = torch.tensor([*text, *([text[-1]] * 40)])
    last = torch.tensor(len(text) - 1)
    tokens, paths, gain = torch.ops.fasteagle_cpu.look_up(
        memory, last, table, kept, list(corpus), 8, REACH, keep
    )
    assert gain == pytest.approx(float((paths - keep).sum()), abs=1e-4)
    return tokens.tolist(), paths.tolist()


@pytest.mark.parametrize("vocabulary", [2, 5, 40])
def test_the_kernel_finds_and_learns_what_the_twin_does(vocabulary):
    rng = random.Random(vocabulary)
    table, kept, twin = lookup_prior(), torch.zeros(4 + REACH, dtype=torch.long), Twin()
    text, sizes = [rng.randrange(vocabulary)], set()
    for step in range(300):
        if step % 40 == 39:  # another conversation
            text = [rng.randrange(vocabulary) for _ in range(3)]
        tokens, paths = looked_up(text, table, kept)
        expected, probabilities = twin(text)
        assert tokens == expected
        assert paths == pytest.approx(probabilities, rel=1e-4)
        assert paths == sorted(paths, reverse=True)
        sizes.add(twin.kept[2])
        new = rng.randrange(1, 4)
        for _ in range(new):  # half of the time the text goes on as before
            follows = tokens[0] if tokens and rng.random() < 0.5 else rng.randrange(vocabulary)
            text.append(follows)
    assert torch.allclose(table[0].double(), twin.tried, rtol=1e-4)
    assert torch.allclose(table[1].double(), twin.right, rtol=1e-4)
    assert len(sizes) > 2


def test_a_longer_match_elsewhere_wins():
    text = [5, 6, 7, 1, 6, 7]
    table, kept = lookup_prior(), torch.zeros(4 + REACH, dtype=torch.long)
    equal, longer = Corpus([[6, 7, 9, 8]], "cpu"), Corpus([[3, 1, 6, 7, 9, 8], [6, 7]], "cpu")
    assert looked_up(text, table, kept)[0][:2] == [1, 6]
    assert looked_up(text, table, kept, equal.index)[0][:2] == [1, 6]  # of equals the text
    assert looked_up(text, table, kept, longer.index)[0] == [9, 8]
    assert looked_up([1, 2, 3], table, kept)[0] == []


@pytest.mark.parametrize("vocabulary", [2, 6, 50])
@pytest.mark.parametrize("longest", [1, 2, 8])
def test_a_corpus_is_searched_as_in_tensor_code(vocabulary, longest):
    rng = random.Random(vocabulary)
    documents = [[rng.randrange(vocabulary) for _ in range(n)] for n in (1, 2, 150, 300)]
    corpus, found = Corpus(documents, "cpu"), 0
    for n in range(1, 60):
        text = torch.tensor([rng.randrange(vocabulary) for _ in range(n)])
        if n % 3 == 0:
            text[-min(n, 5) :] = torch.tensor(documents[-1][n : n + min(n, 5)])
        text[:-1] += 1000 * (text[:-1] == text[-1])  # nothing is found in the text itself
        expected = corpus.find(text, torch.tensor(n - 1), 1, REACH, longest)
        table, kept = lookup_prior(), torch.zeros(4 + REACH, dtype=torch.long)
        tokens, _, _ = torch.ops.fasteagle_cpu.look_up(
            text, torch.tensor(n - 1), table, kept, corpus.index, longest, REACH, 0.0
        )
        assert kept[2] == expected.sizes[0]
        assert tokens.tolist() == [t for t in expected.tokens[0].tolist() if t >= 0]
        found += len(tokens) > 0
    assert found > 5


def test_a_new_turn_teaches_nothing():
    table, kept = lookup_prior(), torch.zeros(4 + REACH, dtype=torch.long)
    before = table.clone()
    text = [1, 2, 3, 1, 2]
    looked_up(text, table, kept)
    looked_up([*text, *([9] * (REACH + 2))], table, kept)
    assert torch.equal(table, before)
    looked_up(text, table, kept)
    looked_up([*text, 9], table, kept)
    assert not torch.equal(table, before)


def test_unlikely_tokens_are_left_out():
    text, table = [1, 2, 3, 1, 2], lookup_prior()
    kept = torch.zeros(4 + REACH, dtype=torch.long)
    paths = looked_up(text, table, kept)[1]
    tokens, likely = looked_up(text, table, kept, keep=paths[3])
    assert likely == paths[:4] and tokens == [3, 1, 2, 3]
    assert looked_up(text, table, kept, keep=0.99) == ([], [])


def test_what_is_right_becomes_likelier():
    table, kept = lookup_prior(), torch.zeros(4 + REACH, dtype=torch.long)
    circle = [1, 2, 3] * 3
    before = looked_up(circle, table, kept)[1]
    for n in range(10, 60):
        after = looked_up(([1, 2, 3] * 20)[:n], table, kept)[1]
    assert after[0] > before[0] and after[-1] > before[-1]
    for n in range(30):
        after = looked_up([*([1, 2, 3] * 20), n + 10, *([1, 2, 3] * 5)], table, kept)[1]
        looked_up([*([1, 2, 3] * 20), n + 10, *([1, 2, 3] * 5), 50], table, kept)
    assert after[0] < 0.8


def fused(target, corpus=None, reach=REACH):
    head = random_head(target, torch.arange(0, 60, 2), rope_base=10000.0)
    quantize_head_(head, Scheme(8, head_bits=8), native=True)
    return FusedDrafter(head, SureChain(reach), 256, lookup=Lookup(corpus=corpus))


def engine_of(target, drafter=None) -> Engine:
    engine = Engine(target, 256, drafter=drafter)
    engine.runner.usual = native_pieces(target)
    return engine


def answer(engine: Engine, params, n=120, prompt=(1, 2, 3)) -> list[int]:
    return [t for new in engine.generate(list(prompt), params, n) for t in new]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("planned", [False, True])
def test_text_stays_that_of_plain_decoding(params, planned):
    _check_text(params, planned, compiled=False)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_text_stays_that_of_plain_decoding_where_compiled(params):
    _check_text(params, planned=True, compiled=True)


def _check_text(params, planned, compiled):
    target = native_target(tiny_config(**SHAPE))
    expected = answer(engine_of(target), params)
    drafter = fused(target)
    engine = engine_of(target, drafter)
    if planned:
        passes = {1: 4.0, 2: 4.1, 9: 4.8, 17: 5.6}
        made = Costs(passes, {}, {}, 0.1, 0.1, lookup=0.02, chain={1: 0.1, LONGEST: 0.5})
        drafter.follow(ChainPlan(made, DEFAULT_RANKS, SureChain(REACH)))
    if compiled:
        compiler = CycleCompiler(engine, DrawKind.of(params, 60))
        compiler.compile()
        compiler.apply()
    for _ in range(2):  # the second time the table has learned
        engine.restart()
        assert answer(engine, params) == expected
    longer = [*expected[:50], 7, *expected[:50]]
    engine.restart()
    plain = engine_of(target)
    assert answer(engine, params, 60, longer) == answer(plain, params, 60, longer)
    if planned:
        assert "looked up" in drafter.controller.explain()


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_another_number_of_nodes_and_back(params, compiled):
    """`/spec N` for the default drafter: trees of one size in place of chains."""
    target = native_target(tiny_config(**SHAPE))
    expected = answer(engine_of(target), params)
    drafter = fused(target)
    engine = engine_of(target, drafter)
    if compiled:
        compiler = CycleCompiler(engine, DrawKind.of(params, 60))
        compiler.compile()
        compiler.apply()
    for used in (drafter.resized(1), drafter.resized(6), drafter.resized(30), drafter):
        engine.use(used)
        engine.restart()
        assert answer(engine, params) == expected
        assert engine.stats.drafted > 0


@pytest.mark.parametrize("reach", [3, REACH, MAX_CHAIN])
def test_a_repetition_is_copied_without_the_draft_head(reach):
    """And the pairs that it has not seen are shown when it is needed again."""
    target = native_target(tiny_config(**SHAPE))
    expected = answer(engine_of(target), SamplingParams(), 200)
    quoted = Corpus([[1, 2, 3, *expected[:150]]], "cpu")
    engine = engine_of(target, fused(target, quoted, reach))
    assert answer(engine, SamplingParams(), 200) == expected
    assert max(engine.stats.path_lengths) == reach
    assert engine.stats.passes < 100


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("planned", [False, True])
def test_without_a_draft_head(params, planned):
    target = native_target(tiny_config(**SHAPE))
    expected = answer(engine_of(target), params, 150)
    quoted = Corpus([[1, 2, 3, *expected[:100]]], "cpu")
    for corpus in (None, quoted):
        drafter = NgramDrafter(longest=8, corpus=corpus)
        drafter.shape = SureChain(REACH)
        if planned:
            made = Costs(
                {1: 4.0, 2: 4.1, 9: 4.8, 17: 5.6}, {}, {}, 0.1, 0.1, chain={1: 0, LONGEST: 0}
            )
            drafter.follow(ChainPlan(made, DEFAULT_RANKS, SureChain(REACH)))
        engine = engine_of(target, drafter)
        assert answer(engine, params, 150) == expected
        if corpus is not None:
            assert engine.stats.passes < 100
        if planned:
            assert "looked-up tokens" in drafter.controller.explain()


@pytest.mark.parametrize("params", [SamplingParams(0.9), SamplingParams(0.9, top_k=5, top_p=0.9)])
@pytest.mark.parametrize("eagle3", [False, True])
def test_cycles_that_draw_are_measured(tmp_path, monkeypatch, eagle3, params):
    """What is kept is of greedy answers: with it, chains were offered that did not pay."""
    target = native_target(tiny_config(**SHAPE))
    kind = eagle3_of("eagle3", target.config) if eagle3 else None
    head = random_head(target, torch.arange(0, 60, 2), rope_base=10000.0, eagle3=kind)
    quantize_head_(head, Scheme(8, head_bits=8), native=True)
    drafter = FusedDrafter(head, SureChain(REACH), 256)
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    engine = engine_of(target, drafter)
    kept, _ = costs_of(engine, drafter, lambda line: None)
    sampled = DrawKind.of(params, 60)
    drawn, _ = costs_of(engine, drafter, lambda line: None, sampled)
    assert min(drawn.other, drawn.plain_other) > 0 and drawn.passes == kept.passes
    assert load_costs(drafter.tuning.path, engine, pytest.fail) == kept  # which is of greedy text
    seen = []

    def other(self, shape):
        seen.append((self._kind, shape))
        return 1.0 if shape else 0.5

    monkeypatch.setattr(Measurement, "_other", other)
    drawn, _ = costs_of(engine, drafter, lambda line: None, sampled)
    assert (drawn.other, drawn.plain_other) == (1.0, 0.5)
    assert seen == [(sampled, SureChain(REACH)), (sampled, None)]


def test_both_sources_are_asked():
    target = native_target(tiny_config(**SHAPE))
    drafter, draft = fused(target), NativeDraft()
    engine = engine_of(target, drafter)
    state, spec = engine.state, engine.spec(SureChain(REACH), DrawKind())
    state.load([1, 2, 3, 4, 5, 6, 7, 8], torch.zeros(1, 64), SamplingParams())
    drafter.reserve(64)
    proposal = draft(state, drafter, spec)  # nothing stood before
    assert proposal.extended and proposal.tree.sources is not None
    state.load([*range(1, 11), *range(1, 11)], torch.zeros(1, 64), SamplingParams())
    proposal = draft(state, drafter, spec)
    assert not proposal.extended
    assert proposal.tree.tokens[:4].tolist() == [10, 1, 2, 3]
    assert proposal.tree.sources.tolist() == [0] + [2] * (len(proposal.tree.tokens) - 1)


def test_files_are_quoted():
    target = native_target(tiny_config(**SHAPE))
    corpus = Corpus([list(range(20, 50))], "cpu")
    drafter, draft = fused(target, corpus), NativeDraft()
    engine = engine_of(target, drafter)
    state, spec = engine.state, engine.spec(SureChain(REACH), DrawKind())
    state.load([1, 2, 30, 31, 32, 33, 34, 35], torch.zeros(1, 64), SamplingParams())
    drafter.reserve(64)
    assert draft(state, drafter, spec).tree.tokens[:4].tolist() == [35, 36, 37, 38]
    assert EAGER.draft is not draft
