"""Speculation changes no token: every drafter, tree and way of drawing against plain decoding."""

from __future__ import annotations

import pytest
import torch

from fasteagle.bench.rivals.ablation import AblatedDrafter
from fasteagle.decoding import cycle
from fasteagle.decoding.cycle import decode_cycle
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import FusedShape, StaticShape, TreeShape
from fasteagle.state import PENDING
from fasteagle.tree import DraftTree, chain
from helpers import (
    GREEDY,
    PROMPT,
    assert_true_pairs,
    drawing,
    eagle3_of,
    empty_state,
    fused_drafter,
    generated,
    raising,
    random_head,
    random_target,
    rest_slow,
    spec_of,
    tiny_config,
)

DRAWN = (
    GREEDY,
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(0.7, seed=3),
    SamplingParams(1.0, top_p=0.9, seed=4),
    SamplingParams(1.0, top_k=8, min_p=0.05, seed=5),
    SamplingParams(0.9, repetition_penalty=1.2, seed=6),
)


@pytest.fixture(scope="module", params=["eagle1", "eagle3"])
def head(request, target):
    return random_head(target, eagle3=eagle3_of(request.param, target.config))


class Fake(Drafter):
    """Proposes what a function of the position says: rows of (token, parent, valid)."""

    name = "fake"
    reads_features = True

    def __init__(self, propose, rows: int, depth: int) -> None:
        self._propose = propose
        self.shape = StaticShape(depth, None, rows - 1)
        self.seen = 0  # committed positions

    def extend(self, new, seq_len):
        count = int(new.count)
        assert 1 <= count <= len(new.tokens) == len(new.features)
        assert int(seq_len) - count <= self.seen  # no position is left out
        self.seen = int(seq_len)

    def propose(self, prediction, state, spec):
        assert self.seen == int(state.seq_len)
        context = state.text[: self.seen + 1].tolist()
        assert context[-1] == int(state.root)
        return self._propose(context)


def oracle(truth, depth, every=1):
    """A chain of what plain decoding said; wrong at every `every`-th position if > 1."""

    def propose(context):
        at = len(context)
        tokens = [context[-1]]
        for i in range(at, at + depth):
            token = truth[i] if i < len(truth) else 0
            tokens.append(token if every == 1 or i % every else (token + 1) % 60)
        return chain(torch.tensor(tokens), torch.ones(depth + 1, dtype=torch.bool))

    return propose


def drafters(target, head):
    """Every drafter with several shapes."""
    trimmed = random_head(target, torch.arange(0, 60, 2), seed=2, eagle3=head.config.eagle3)
    made = {
        f"eagle {d}-{k}-{n}": EagleDrafter(head, TreeShape(d, k, n))
        for d, k, n in ((1, 1, 1), (1, 4, 3), (3, 4, 7), (6, 10, 59), (4, 2, 10))
    }
    made["chain"] = EagleDrafter(head, TreeShape(5, 1, 5))
    made["trimmed"] = EagleDrafter(trimmed, TreeShape(3, 4, 7))
    usual = EagleDrafter(head, TreeShape(3, 4, 7))
    made["by confidence"] = AblatedDrafter(usual, by_confidence=True, reranks=True)
    made["no rerank"] = AblatedDrafter(usual, by_confidence=False, reranks=False)
    made["static"] = StaticTreeDrafter(head)
    made["static two levels"] = StaticTreeDrafter(head, ((0,), (1,), (1, 0)))
    made["ngram"] = NgramDrafter(depth=4)
    for levels, k, n, reach in ((3, 3, 8, 8), (1, 2, 12, 11), (4, 3, 10, 2), (2, 1, 3, 3)):
        shape = FusedShape(levels, k, n, reach)
        made[f"fused {levels}-{k}-{n}-{reach}"] = fused_drafter(head, shape)
    made["fused trimmed"] = fused_drafter(trimmed, FusedShape(3, 4, 7, 8))
    made["lookup alone"] = fused_drafter(head, FusedShape(0, 1, 8, 8))
    return made


ONE_OF_EACH = ("eagle 6-10-59", "trimmed", "no rerank", "static", "ngram", "fused 3-3-8-8")


WAYS = [("eagle1", GREEDY), ("eagle3", GREEDY)]
WAYS += [(("eagle1", "eagle3")[i % 2], params) for i, params in enumerate(DRAWN[1:])]


@pytest.mark.parametrize(("algorithm", "params"), WAYS, ids=str)
def test_every_drafter_gives_the_tokens_of_plain_decoding(target, algorithm, params):
    """All of them with one kind of head and where nothing is drawn, else one of each kind."""
    n = 26
    expected = generated(Engine(target, 512), n, params=params)
    made = drafters(target, random_head(target, eagle3=eagle3_of(algorithm, target.config)))
    for name in made if (algorithm, params) == WAYS[0] else ONE_OF_EACH:
        drafter = made[name]
        engine = Engine(target, 512, drafter=drafter)
        assert generated(engine, n, params=params) == expected, name
        stats = engine.stats
        n_drafted = len(stats.path_lengths)
        assert stats.new_tokens == n and 0 < n_drafted <= stats.passes
        may_have_none = name in ("ngram", "lookup alone")
        assert may_have_none or n_drafted == stats.passes
        assert 0 < stats.passes < n and stats.drafted <= stats.passes * drafter.shape.nodes
        shape = drafter.shape
        fills = not isinstance(shape, FusedShape) or shape.head_pool >= shape.nodes
        assert may_have_none or not fills or stats.drafted == stats.passes * shape.nodes
        assert stats.tau == pytest.approx((n - 1) / stats.passes)


@pytest.mark.parametrize("family", [{"n_kv_head": 4}, {"sliding_window": 6}, {"qk_norm": True}])
def test_other_targets(family):
    target = random_target(tiny_config(**family))
    head = random_head(target, qk_norm=False, sliding_window=None)
    expected = generated(Engine(target, 512), 30)
    for shape in (TreeShape(3, 4, 7), TreeShape(6, 10, 59)):
        drafter = EagleDrafter(head, shape)
        assert generated(Engine(target, 512, drafter=drafter), 30) == expected


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(repetition_penalty=1.5)], ids=str)
@pytest.mark.parametrize("n", [59, 60, 61])
def test_a_drafter_that_is_always_right(target, n, params):
    """Also under a penalty, which each accepted token of a path adds to."""
    truth = PROMPT + generated(Engine(target, 512), 80, params=params)
    engine = Engine(target, 512, drafter=Fake(oracle(truth, 5), 6, 5))
    assert generated(engine, n, params=params) == truth[len(PROMPT) :][:n]
    assert engine.stats.passes == -(-(n - 1) // 6)  # six tokens a pass
    assert set(engine.stats.path_lengths[:-1]) == {5}
    assert engine.stats.accepted + engine.stats.passes >= n - 1


def test_logits_after_the_end_of_an_answer_do_not_matter(target):
    """Plain decoding never computes them: an end in an accepted path comes before them."""
    truth = generated(Engine(target, 512))
    at = next(i for i in range(9, 60) if truth[i] not in truth[:i])
    end = truth[at]

    class Breaks:
        def __call__(self, logits, tree):
            return logits.masked_fill((tree.tokens == end).unsqueeze(1), float("nan"))

        def accept(self, tokens):
            pass

    for depth in (1, 2, 5):
        drafter = Fake(oracle(PROMPT + truth, depth), depth + 1, depth)
        engine = Engine(target, 512, drafter=drafter)
        for ends in ({"eos_ids": frozenset({end})}, {"is_last": lambda token: token == end}):
            answer = engine.generate(PROMPT, GREEDY, 60, processor=Breaks(), **ends)
            assert [t for ids in answer for t in ids] == truth[: at + 1]
        with pytest.raises(FasteagleError, match=f"at position {len(PROMPT) + at + 1}: "):
            list(engine.generate(PROMPT, GREEDY, 60, processor=Breaks()))


def test_a_drafter_that_is_never_or_sometimes_right(target):
    truth = PROMPT + generated(Engine(target, 512))
    wrong = [(t + 1) % 60 for t in truth]
    engine = Engine(target, 512, drafter=Fake(oracle(wrong, 3), 4, 3))
    assert generated(engine) == truth[len(PROMPT) :]
    assert engine.stats.tau == 1.0 and engine.stats.accepted == 0
    engine = Engine(target, 512, drafter=Fake(oracle(truth, 4, every=3), 5, 4))
    assert generated(engine) == truth[len(PROMPT) :]
    assert 1.5 < engine.stats.tau < 4


def test_the_right_token_on_any_branch_is_found(target):
    """The truth hangs below the last of three siblings."""
    truth = PROMPT + generated(Engine(target, 512), 80)

    def propose(context):
        at = len(context)
        a, b = (truth[i] if i < len(truth) else 0 for i in (at, at + 1))
        rows = [context[-1], (a + 1) % 60, (a + 2) % 60, a, (b + 1) % 60, b]
        return DraftTree(torch.tensor(rows), torch.tensor([0, 0, 0, 0, 3, 3]), torch.ones(6).bool())

    engine = Engine(target, 512, drafter=Fake(propose, 6, 2))
    assert generated(engine) == truth[len(PROMPT) :][:60]
    assert set(engine.stats.path_lengths[:-1]) == {2}


def test_rejected_rows_leave_nothing_in_the_caches(target, head):
    """Caches after speculation equal those of a plain run, row for row."""
    plain = Engine(target, 512)
    out = generated(plain, 30)
    made = drafters(target, head)
    for name in ONE_OF_EACH:
        engine = Engine(target, 512, drafter=made[name])
        assert generated(engine, 30) == out
        assert engine.cached == plain.cached
        n = len(plain.cached)
        for (k, v), (k2, v2) in zip(plain.cache.layers, engine.cache.layers, strict=True):
            assert torch.allclose(k[:, :n], k2[:, :n], atol=1e-4)
            assert torch.allclose(v[:, :n], v2[:, :n], atol=1e-4)


def test_draft_cache_holds_the_true_pairs(target, head):
    """After a run and a follow-up, the head's cache equals one filled from the whole text."""
    drafter = EagleDrafter(head, TreeShape(3, 4, 7))
    engine = Engine(target, 512, drafter=drafter)
    assert engine.spec(drafter.shape, SamplingMode()).width == 4  # an accepted path, and one more
    text = PROMPT + generated(engine, 30)
    text = [*text, 7, 3, 1]
    text = text + generated(engine, 20, text)
    assert engine.stats.cached_tokens > 30
    assert_true_pairs(engine, text, missing=10)
    engine.use(EagleDrafter(head, TreeShape(3, 4, 7)))  # which has seen nothing of it
    text = [*text, 7, 3, 1]
    text = text + generated(engine, 20, text)
    assert_true_pairs(engine, text, missing=10)
    engine.restart()  # and after more plain cycles than pairs are stored for
    text = PROMPT + generated(engine, PENDING + 40, speculate=False)
    assert_true_pairs(engine, text, missing=10)


def test_follow_ups_and_changed_histories(target, head):
    drafter = EagleDrafter(head, TreeShape(3, 4, 7))
    engine = Engine(target, 512, drafter=drafter)
    first = generated(engine, 20)
    for prompt in (PROMPT + first + [1, 2], PROMPT + first, PROMPT[:5], PROMPT, [1], [1, 2]):
        assert generated(engine, 15, prompt) == generated(Engine(target, 512), 15, prompt), prompt


def test_breaking_off_anywhere_leaves_the_engine_usable(target, head, monkeypatch):
    expected = generated(Engine(target, 512))
    for step in ("extend", "propose"):
        drafter = EagleDrafter(head, TreeShape(3, 4, 7))
        engine = Engine(target, 512, drafter=drafter)
        original, calls = getattr(drafter, step), []

        def interrupted(*args, original=original, calls=calls):
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return original(*args)

        monkeypatch.setattr(drafter, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            generated(engine)
        assert generated(engine) == expected


def test_pairs_that_memory_was_short_for_are_shown_later(target, head, monkeypatch):
    engine = Engine(target, 512, drafter=EagleDrafter(head, TreeShape(3, 4, 7)))
    with monkeypatch.context() as short:
        short.setattr(engine.drafter, "show", raising(torch.OutOfMemoryError("none")))
        with pytest.raises(FasteagleError, match="out of memory at token 8:"):
            generated(engine)
    assert_true_pairs(engine, PROMPT + generated(engine, 20), missing=10)


def test_breaking_off_after_a_commit_shows_the_head_no_wrong_pairs(target, head, monkeypatch):
    """Those that it had not seen are replaced by then."""
    drafter = EagleDrafter(head, TreeShape(12, 1, 12))  # it reads as many pairs at once
    shapes, commit = iter([None] * 12 + [drafter.shape]), cycle.commit
    monkeypatch.setattr(drafter, "next_shape", lambda: next(shapes, None))

    def interrupted(state, spec, *rest):
        commit(state, spec, *rest)
        if spec.shape is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(cycle, "commit", interrupted)
    engine = Engine(target, 512, drafter=drafter)
    with pytest.raises(KeyboardInterrupt):
        generated(engine)
    text = [*engine.cached, int(engine.state.text[len(engine.cached)])]
    text = text + generated(engine, 20, text)
    assert_true_pairs(engine, text, missing=30)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, seed=8)])
def test_ends_in_the_middle_of_an_accepted_path(target, params):
    """End of text, length and context, at every offset within a path of five."""
    truth = generated(Engine(target, 512), 80, params=params)
    whole = PROMPT + truth

    def engine(max_seq_len=512):
        return Engine(target, max_seq_len, drafter=Fake(oracle(whole, 5), 6, 5))

    for at in range(1, 14):
        eos = truth[at]
        expected = truth[: truth.index(eos) + 1]
        made = engine()
        assert generated(made, params=params, eos_ids=frozenset({eos})) == expected
        assert made.stats.finish == "eos" and made.cached == PROMPT + expected[:-1]
        assert generated(made, at, params=params) == truth[:at]
        assert made.stats.finish == "length" and made.cached == PROMPT + truth[: at - 1]
        whole_paths, last = divmod(at - 2, 6)
        lengths = [5] * whole_paths + [min(5, last + 1)] if at > 1 else []
        assert made.stats.path_lengths == lengths
        small = engine(len(PROMPT) + at)
        assert generated(small, params=params) == truth[:at] and small.stats.finish == "context"
        follow_up = PROMPT + expected + [3]
        assert generated(made, 9, follow_up, params) == generated(
            Engine(target, 512), 9, follow_up, params
        )


def test_a_tree_deeper_than_the_state_has_room_for(target, head):
    with pytest.raises(FasteagleError, match="tree-depth 64 is out of range: use at most 63"):
        Engine(target, 512, drafter=EagleDrafter(head, TreeShape(64, 1, 64)))
    assert generated(Engine(target, 512, drafter=EagleDrafter(head, TreeShape(63, 1, 63))), 9)


# Tracing takes seconds a level: each kind of drafter and of shape once, with one kind of head.
DRAW = SamplingParams(0.8, seed=3)
TRACED = [
    ("eagle1", "fused 3-3-8-8", GREEDY),
    ("eagle3", "static two levels", DRAW),
    ("eagle1", "eagle 3-4-7", DRAW),
    ("eagle3", "eagle 1-4-3", GREEDY),
    ("eagle1", "trimmed", GREEDY),
    ("eagle3", "chain", DRAW),
    ("eagle3", "by confidence", GREEDY),
    ("eagle1", "ngram", DRAW),
    ("eagle3", "fused 1-2-12-11", DRAW),
    ("eagle1", "fused trimmed", DRAW),
    ("eagle3", "lookup alone", GREEDY),
]


@torch.no_grad()
@pytest.mark.parametrize(("algorithm", "name", "params"), rest_slow(TRACED, 2), ids=str)
def test_the_whole_cycle_is_one_graph_whatever_the_length(
    target, algorithm, name, params, no_recompiles
):
    """No break, nothing read by the host; the committed length is a value, not another graph."""
    kind, _ = drawing(params, target.config.vocab_size)
    head = random_head(target, eagle3=eagle3_of(algorithm, target.config))
    drafter, twin = (drafters(target, head)[name] for _ in range(2))
    fast, slow = empty_state(target), empty_state(target)
    for state, own in ((fast, drafter), (slow, twin)):
        own.reserve(256)
        state.read_aux_layers(own.aux_layers, target.config.dim)
    spec = spec_of(drafter.shape, drafter.shape.depth + 1, kind)
    compiled = torch.compile(decode_cycle, fullgraph=True, backend="eager")
    for seq_len in (7, 20, 25):  # the last is near enough to learn from
        for state in (fast, slow):
            state.load([*range(1, 9)] * 5, torch.ones(1, state.features.shape[1]), params)
            state.seq_len.fill_(seq_len)
        compiled(fast, target, drafter, spec)
        decode_cycle(slow, target, twin, spec)
        assert all(map(torch.equal, fast.advanced, slow.advanced))
        assert all(map(torch.equal, drafter.advanced, twin.advanced))
        torch.compiler.set_stance("fail_on_recompile")


def test_padding_of_a_short_path_is_not_penalized():
    """It is token 0, which neither the prompt nor the answer has."""
    target = random_target(tiny_config())
    engine = Engine(target, 256, drafter=NgramDrafter(4))
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    params = SamplingParams(repetition_penalty=1.2)
    text = generated(engine, 40, prompt, params)
    seen = set(engine.state.seen[0].nonzero().flatten().tolist())
    assert engine.stats.drafted > engine.stats.accepted
    assert 0 not in {*prompt, *text} and seen == {*prompt, *text}
