"""Looked-up chains in our CPU kernels: against plain Python, and inside whole answers."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fasteagle.compile import blocks
from fasteagle.compile.blocks import compile_now
from fasteagle.compile.costs import begin_policy, store_costs, tune_now
from fasteagle.compile.cpu_draft import NativeChain, NativeDraft, look_up
from fasteagle.compile.measurement import Measurement
from fasteagle.drafting.base import Tuning
from fasteagle.drafting.costs import Costs
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ladder import DEFAULT_RANKS
from fasteagle.drafting.lookup import LONGEST_MATCH, Corpus, Lookup
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.policy import MAX_CHAIN, REACH, Policy
from fasteagle.drafting.thresholds import LONGEST, Thresholds
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import GatedChain, TreeShape
from fasteagle.tree import Proposal
from helpers import compile_cycles, empty_state, fused_drafter, generated, spec_of
from native_cycles import engine_of
from native_models import native_head

pytestmark = pytest.mark.usefixtures("cpu_kernels")

PARAMS = [SamplingParams(), SamplingParams(0.7, seed=4), SamplingParams(0.8, top_p=0.9, seed=2)]


def looked_up(text: list[int], lookup: Lookup, keep: float = 0.0):
    # Around the text are values that must not be read, after it those of another text.
    memory = torch.tensor([*text[:1] * 9, *text, *([text[-1]] * 40)])[9:]
    last = torch.tensor(len(text) - 1)
    corpus = [] if lookup.corpus is None else lookup.corpus.index
    tokens, paths, gain = torch.ops.fasteagle_cpu.look_up(
        memory, last, lookup.table, lookup.last, corpus, LONGEST_MATCH, REACH, keep
    )
    assert gain == pytest.approx(float((paths - keep).sum()), abs=1e-4)
    return tokens.tolist(), paths.tolist()


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("vocabulary", [2, 5, 40])
def test_the_kernel_finds_and_learns_what_the_tensor_code_does(vocabulary, quoted):
    rng = random.Random(vocabulary)
    n_tokens = 3000 if vocabulary == 2 else 90  # of 3000 more places match than are compared
    documents = [[rng.randrange(vocabulary) for _ in range(n)] for n in (1, n_tokens)]
    corpus = Corpus(documents, "cpu") if quoted else None
    native, twin = Lookup(corpus=corpus), Lookup(corpus=corpus)
    for lookup in (native, twin):  # as if many long matches had been wrong
        lookup.table[0, -1], lookup.table[1, -1] = 128.0, 0.0
    text, sizes = [rng.randrange(vocabulary)], set()
    for step in range(400):
        if step % 60 == 59:  # another conversation
            text = [rng.randrange(vocabulary) for _ in range(3)]
        elif step % 60 == 30:  # a new turn, further than the chain reached
            text += [rng.randrange(vocabulary) for _ in range(REACH + 2)]
        elif step % 60 == 45:  # another text as long as this one
            text = [rng.randrange(vocabulary) for _ in text]
        tokens, paths = looked_up(text, native)
        memory = torch.tensor([*text, *([text[-1]] * 40)])
        expected, logp = twin.propose(memory, torch.tensor(len(text) - 1), REACH)
        assert tokens == [token for token in expected.tolist() if token >= 0]
        assert paths == pytest.approx(logp.cumsum(0).exp()[: len(paths)].tolist(), rel=1e-4)
        n = 4 + len(tokens)
        assert torch.equal(native.last[:n], twin.last[:n])
        assert torch.allclose(native.table, twin.table, rtol=1e-5)
        sizes.add(int(twin.last[2]))
        if step % 60 == 15:  # all of the chain was right
            text += [*tokens, rng.randrange(vocabulary)]
            continue
        new = rng.randrange(1, 4)
        for _ in range(new):  # half of the time the text goes on as before
            follows = tokens[0] if tokens and rng.random() < 0.5 else rng.randrange(vocabulary)
            text.append(follows)
    assert len(sizes) > 2 and native.table[0].max() > 20


def test_what_does_not_fit_a_lookup_is_refused():
    own = Lookup()
    usual = {"text": torch.arange(9), "last": 8, "table": own.table, "recent": own.last, "reach": 5}

    def run(text, last, table, recent, reach):
        last = torch.tensor(last)
        return torch.ops.fasteagle_cpu.look_up(
            text, last, table, recent, [], LONGEST_MATCH, reach, 0.0
        )

    run(**usual)
    for changes, message in (
        ({"last": 9}, "last token at 9"),
        ({"last": -1}, "last token at -1"),
        ({"text": torch.arange(18)[::2]}, "last token at 8"),
        ({"table": own.table[0]}, "a table"),
        ({"table": own.table.mT}, "a table"),
        ({"recent": own.last[:8]}, "a table"),
        ({"recent": own.last.repeat(2)[::2]}, "a table"),
        ({"reach": -1}, "a table"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**usual | changes)


def test_unlikely_tokens_are_left_out():
    text, lookup = [1, 2, 3, 1, 2], Lookup()
    paths = looked_up(text, lookup)[1]
    tokens, likely = looked_up(text, lookup, keep=paths[3])
    assert likely == paths[:4] and tokens == [3, 1, 2, 3]
    assert looked_up(text, lookup, keep=0.99) == ([], [])


def fused(target, corpus=None, reach=REACH):
    head = native_head(target, draft_ids=torch.arange(0, 60, 2))
    return fused_drafter(head, GatedChain(reach), lookup=Lookup(corpus=corpus))


def answer(engine: Engine, params, n=120, prompt=(1, 2, 3)) -> list[int]:
    return generated(engine, n, list(prompt), params)


PASSES = {1: 4.0, 2: 4.1, 9: 4.8, 17: 5.6}
RUNS = [(PARAMS[0], False, False), (PARAMS[1], True, False), (PARAMS[2], True, True)]


def policy_of(level: float, head: bool) -> Policy:
    """A policy for costs in which a chain of the draft head takes `level` ms a token."""
    chain = {1: level, LONGEST: 5 * level}
    costs = Costs(PASSES, {}, {}, 0.1, 0.1, lookup=0.02 * head, chain=chain)
    return Policy(costs, DEFAULT_RANKS, [GatedChain(REACH)], head=head, lookup=True)


@pytest.mark.parametrize(("params", "planned", "compiled"), RUNS, ids=str)
def test_text_stays_that_of_plain_decoding(native, params, planned, compiled):
    expected = answer(engine_of(native), params)
    drafter = fused(native)
    engine = engine_of(native, drafter)
    if planned:
        drafter.policy = policy_of(0.1, head=True)
    if compiled:
        compile_cycles(engine, SamplingMode.of(params, 60))
    for _ in range(2):  # the second time the table has learned
        engine.restart()
        assert answer(engine, params) == expected
    longer = [*expected[:50], 7, *expected[:50]]
    engine.restart()
    plain = engine_of(native)
    assert answer(engine, params, 60, longer) == answer(plain, params, 60, longer)
    if planned:
        assert "looked up" in drafter.policy.explain()


@pytest.mark.parametrize("head", [False, True])
def test_chains_are_measured_where_cycles_are_compiled(native, head, tmp_path, monkeypatch):
    """Those of the draft head as long as they can be."""
    draft, drafted = NativeChain.draft, []

    def noting(self, texts, depth, thresholds):
        chains = draft(self, texts, depth, thresholds)
        drafted.append((depth, len(chains[0][0])))
        return chains

    monkeypatch.setattr(NativeChain, "draft", noting)
    drafter = fused(native) if head else NgramDrafter()
    drafter.shape = GatedChain(REACH)
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    engine = engine_of(native, drafter)
    compile_cycles(engine)
    drafter.fixed_thresholds = Thresholds((2.0,), (2.0,))  # which would end all chains at once
    policy, seconds = tune_now(engine, pytest.fail, compiled=True)
    assert 0 < seconds < 600 and policy is drafter.policy and policy.shapes == [GatedChain(REACH)]
    assert policy.costs.lookup > 0 and (policy.costs.chain[LONGEST] > 0) == head
    assert {*drafted} == ({(1, 1), (LONGEST, LONGEST)} if head else set())
    assert answer(engine, SamplingParams()) == answer(engine_of(native), SamplingParams())


def test_chains_have_a_policy_before_anything_is_measured(native, tmp_path, monkeypatch):
    """Usual costs, in passes of this machine: the second one, for the first may read the disk."""
    times = itertools.cycle((900.0, 40.0))
    monkeypatch.setattr(Measurement, "verify", lambda self, T: next(times))
    drafter = fused(native)
    engine = engine_of(native, drafter)
    begin_policy(engine)
    assert drafter.policy is None, "a chain of a fixed size has none"
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    begin_policy(engine)
    assert drafter.policy.shapes == [GatedChain(REACH)] and not list(tmp_path.iterdir())
    costs = drafter.policy.costs
    assert costs.passes[1] == 40.0 and costs.chain[8] == 0.45 * 40.0
    assert drafter.policy.looks_up and drafter.policy.head_gain is not None
    ngram = NgramDrafter()
    ngram.shape, ngram.tuning = drafter.shape, drafter.tuning
    begin_policy(engine_of(native, ngram))
    assert ngram.policy.looks_up and ngram.policy.head_gain is None
    begin_policy(engine_of(native))
    tree = EagleDrafter(drafter.head, TreeShape(3, 3, 8))
    tree.tuning = drafter.tuning
    begin_policy(engine_of(native, tree))
    assert tree.policy is None, "a tree waits for what is measured"
    store_costs(engine, drafter, costs.scaled(2.0), 1.0)
    begin_policy(engine)
    assert drafter.policy.costs.passes[1] == 80.0, "measured at an earlier start"


@pytest.mark.parametrize(("params", "compiled"), [(PARAMS[0], True), (PARAMS[2], False)], ids=str)
def test_another_number_of_nodes_and_back(native, params, compiled):
    """`/spec N` for the default drafter: chains of the kernels that do not end early."""
    expected = answer(engine_of(native), params)
    drafter = fused(native)
    engine = engine_of(native, drafter)
    if compiled:
        compile_cycles(engine, SamplingMode.of(params, 60))
    for other in (drafter.resized(1), drafter.resized(6), drafter.resized(30), drafter):
        engine.use(other)
        engine.restart()
        assert answer(engine, params) == expected
        assert engine.stats.drafted > 0
        assert engine.backend.drafts(other, spec_of(other.shape))


def test_where_kernels_run_all_of_it_nothing_is_compiled(native, monkeypatch):
    monkeypatch.setattr(blocks, "missing_compiler", lambda: "nobody asks")
    said = []
    for drafter in (None, NgramDrafter(), fused(native)):
        if isinstance(drafter, NgramDrafter):
            drafter.shape = GatedChain(REACH)
        engine = engine_of(native, drafter)
        run = engine.target.ops.run_blocks
        assert compile_now(engine, SamplingParams(0.8), said.append) and not said
        assert engine.target.ops.run_blocks == run
        assert answer(engine, SamplingParams(), 8)
    engine = engine_of(native, EagleDrafter(fused(native).head, TreeShape(2, 2, 4)))
    assert not compile_now(engine, None, said.append), "trees are none of the kernels'"


def test_a_chain_of_a_fixed_number_of_tokens(native):
    head = fused(native).head
    engine = engine_of(native, EagleDrafter(head, GatedChain(LONGEST)).resized(3))
    answer(engine, SamplingParams())
    assert engine.stats.drafted == 3 * len(engine.stats.path_lengths) > 0


@pytest.mark.parametrize("reach", [3, REACH, MAX_CHAIN])
def test_a_repetition_is_copied_without_the_draft_head(native, reach):
    """And the pairs that it has not seen are shown when it is needed again."""
    expected = answer(engine_of(native), SamplingParams(), 200)
    quoted = Corpus([[1, 2, 3, *expected[:150]]], "cpu")
    engine = engine_of(native, fused(native, quoted, reach))
    assert answer(engine, SamplingParams(), 200) == expected
    assert max(engine.stats.path_lengths) == reach
    assert engine.stats.passes < 100


def test_a_chain_that_promises_no_more_than_the_head_is_left_to_it(native, monkeypatch):
    """One of nothing too, where a policy finds the head worth nothing."""
    drafter, state = fused(native), empty_state(native)

    def copied(text: list[int], head_gain: float | None) -> list[int] | None:
        state.text[: len(text)] = torch.tensor(text)
        state.seq_len.fill_(len(text) - 1)
        monkeypatch.setattr(EagleDrafter, "head_gain", head_gain)
        tokens = look_up(state, drafter, REACH)
        return None if tokens is None else tokens.tolist()

    repetition, new = [1, 2, 3, 1, 2], [1, 2, 3]
    assert copied(repetition, None)[:3] == copied(repetition, 0.0)[:3] == [3, 1, 2]
    assert copied(repetition, 100.0) is None
    assert copied(new, None) == [] and copied(new, 0.0) is None


@pytest.mark.parametrize(("params", "planned"), [(PARAMS[0], False), (PARAMS[2], True)], ids=str)
def test_without_a_draft_head(native, params, planned):
    expected = answer(engine_of(native), params, 150)
    quoted = Corpus([[1, 2, 3, *expected[:100]]], "cpu")
    for corpus in (None, quoted):
        drafter = NgramDrafter(lookup=Lookup(corpus=corpus))
        drafter.shape = GatedChain(REACH)
        if planned:
            drafter.policy = policy_of(0.0, head=False)
        engine = engine_of(native, drafter)
        assert answer(engine, params, 150) == expected
        if corpus is not None:
            assert engine.stats.passes < 100
        if planned:
            assert "looked up" in drafter.policy.explain()


def test_both_sources_are_used_and_files_are_quoted(native):
    drafter, draft = fused(native, Corpus([list(range(20, 50))], "cpu")), NativeDraft()
    engine = engine_of(native, drafter)
    spec = engine.spec(GatedChain(REACH), SamplingMode())
    drafter.reserve(64)

    def after(*text: int) -> Proposal:
        engine.state.load([*text], torch.zeros(1, 64), SamplingParams())
        return draft(engine.state, drafter, spec)

    proposal = after(1, 2, 3, 4, 5, 6, 7, 8)  # nothing stood before
    assert proposal.extended and proposal.tree.sources is not None
    proposal = after(*range(1, 11), *range(1, 11))
    assert not proposal.extended
    assert proposal.tree.tokens[:4].tolist() == [10, 1, 2, 3]
    assert proposal.tree.sources.tolist() == [0] + [2] * (len(proposal.tree.tokens) - 1)
    assert after(1, 2, 30, 31, 32, 33, 34, 35).tree.tokens[:4].tolist() == [35, 36, 37, 38]
