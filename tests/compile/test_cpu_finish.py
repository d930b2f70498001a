"""Ends of cycles in our CPU kernels: the state that the eager pieces leave."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.compile.cpu_pass import NativeFinish
from fasteagle.decoding.cycle import EAGER
from fasteagle.generate import Engine
from fasteagle.model import Output
from fasteagle.options import SamplingParams
from fasteagle.quant.cpu_tensors import Sampling, State, Tree
from fasteagle.sampling import BAD_ROW, SamplingMode, draw
from fasteagle.shapes import AnyShape, FusedShape, TreeShape
from fasteagle.state import CycleSpec
from fasteagle.tree import HEAD, LOOKUP, DraftTree, Proposal
from native_models import random_tree, state_of

pytestmark = pytest.mark.usefixtures("cpu_kernels")

finish = NativeFinish()


def test_what_does_not_fit_the_end_of_a_cycle_is_refused(native):
    state, T = state_of(native, 5), 4
    arguments = {"logits": torch.zeros(T, 60), "read": torch.zeros(T, 64)}
    tree = Tree(torch.zeros(T).long(), torch.zeros(T).long(), torch.ones(T).bool())
    own = dict(seq_len=state.seq_len, root=state.root, count=state.count, rows=state.cache.rows)
    tokens, text, result = (torch.zeros(n).long() for n in (9, 99, 9))
    memory = State(**own, tokens=tokens, features=torch.zeros(9, 64), text=text, result=result)

    def run(arguments=arguments, tree=tree, memory=memory, count=1, seq_len=5, **changes):
        state.seq_len.fill_(seq_len)
        state.count.fill_(count)
        how = dict(sampling=Sampling(), depth=1, in_place=False, extends=True, keeps=True)
        how |= changes
        torch.ops.fasteagle_cpu.finish_cycle(**arguments, tree=tree, state=memory, **how)

    run()
    run(count=7, extends=False)
    half, other, apart = torch.zeros(T, 64).half(), torch.zeros(2), torch.zeros(2 * T).long()[::2]
    nothing = {name: tensor[:0] for name, tensor in arguments.items()}
    deep = Tree(tree.tokens, torch.arange(T).sub(1).clamp(min=0), tree.valid)
    before, after = torch.tensor([0, 0, 0, -1]), torch.tensor([0, 2, 0, 0])
    unknown = torch.tensor([60, 0, 0, 0])
    flags, flags_apart = torch.zeros(60).bool(), torch.zeros(120).bool()[::2]
    penalty = Sampling(penalty=torch.tensor(1.0), seen=flags)
    for changes, message in (
        ({"arguments": arguments | {"logits": torch.zeros(T * 60)}}, "a state and a tree"),
        ({"arguments": arguments | {"logits": torch.zeros(T, 1, 60)}}, "a state and a tree"),
        ({"arguments": arguments | {"logits": torch.zeros(T + 1, 60)}}, "a state and a tree"),
        ({"arguments": nothing, "tree": [t[:0] for t in tree[:3]] + [None]}, "a state and a tree"),
        ({"arguments": arguments | {"logits": torch.zeros(T, 60).half()}}, r"fp32 \[T, V\]"),
        ({"arguments": arguments | {"read": half}}, "x in fp32 or bf16"),
        ({"arguments": arguments | {"read": torch.zeros(T, 128)[:, ::2]}}, r"x is \[T, 64\]"),
        ({"arguments": arguments | {"read": torch.zeros(T, 8, 8)}}, "features of each row"),
        ({"arguments": arguments | {"read": torch.zeros(T - 1, 64)}}, "features of each row"),
        ({"tree": tree._replace(tokens=apart)}, "for each row"),
        ({"tree": tree._replace(parents=apart)}, "for each row"),
        ({"tree": tree._replace(valid=torch.ones(2 * T).bool()[::2])}, "for each row"),
        ({"tree": tree._replace(sources=apart)}, "for each row"),
        ({"tree": tree._replace(parents=tree.parents[:2])}, "for each row"),
        ({"tree": tree._replace(valid=tree.valid[:2])}, "for each row"),
        ({"tree": tree._replace(sources=tree.parents[:2])}, "for each row"),
        ({"tree": tree._replace(parents=before)}, "parent -1 of row 3"),
        ({"tree": tree._replace(parents=after)}, "parent 2 of row 1"),
        ({"tree": tree[:3]}, "4 tensors: tokens parents valid sources"),
        ({"tree": deep}, "a path of 3 levels"),
        ({"depth": -1}, "a state and a tree"),
        ({"seq_len": -3}, "room for the path"),
        ({"memory": memory._replace(text=text[:7])}, "room for the path"),
        ({"memory": memory._replace(result=result[:3])}, "room for the path"),
        ({"memory": memory._replace(rows=memory.rows[0])}, "cache"),
        ({"memory": memory._replace(rows=memory.rows[:, :, ::2])}, "cache"),
        ({"memory": memory._replace(rows=memory.rows[:, :, :8].contiguous())}, "cache"),
        ({"count": 8, "extends": False}, "room for pairs"),
        ({"count": -1, "extends": False}, "room for pairs"),
        ({"memory": memory._replace(tokens=torch.zeros(1).long())}, "room for pairs"),
        ({"memory": memory._replace(tokens=torch.zeros(18).long()[::2])}, "room for pairs"),
        ({"memory": memory._replace(features=torch.zeros(1, 64))}, "room for pairs"),
        ({"memory": memory._replace(features=torch.zeros(9, 8, 8))}, "room for pairs"),
        ({"memory": memory._replace(features=torch.zeros(9, 64).half())}, "x in fp32 or bf16"),
        ({"memory": memory._replace(text=torch.zeros(198).long()[::2])}, "contiguous state"),
        ({"memory": memory._replace(root=torch.zeros(0).long())}, "contiguous state"),
        ({"memory": [*memory, other]}, "8 tensors: seq_len root count"),
        ({"sampling": penalty._replace(seen=flags[:59])}, "a flag for each token"),
        ({"sampling": penalty._replace(seen=flags_apart)}, "a flag for each token"),
        ({"sampling": penalty._replace(seen=None)}, "a penalty and the tokens under it"),
        ({"sampling": Sampling(seen=flags)}, "a penalty and the tokens under it"),
        ({"sampling": Sampling(temperature=torch.tensor(1.0))}, "a temperature and a seed"),
        ({"sampling": penalty, "tree": tree._replace(tokens=unknown)}, "token 60"),
        ({"sampling": penalty, "memory": memory._replace(root=unknown[:1])}, "token 60"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**changes)


def output_for(tree: DraftTree, target, generator, state, wrong: str) -> Output:
    """Logits whose best tokens are often those of a child."""
    T, V = len(tree.tokens), target.config.vocab_size
    logits = torch.randn(T, V, generator=generator)
    for j in range(1, T):
        if torch.rand(1, generator=generator) < 0.7:
            logits[tree.parents[j], tree.tokens[j]] = 9.0
    if wrong:
        logits[int(torch.randint(0, T, (1,), generator=generator)), 3] = float(wrong)
    width = state.features.shape[1]
    read = torch.randn(T, width, generator=generator).to(state.features.dtype)
    return Output(logits, read, read.float() if state.aux_layers else None)


DRAWN = [
    SamplingParams(),
    SamplingParams(0.9),
    SamplingParams(0.9, top_k=5),
    SamplingParams(1.2, top_p=0.8),
    SamplingParams(0.7, top_k=7, top_p=0.9, min_p=0.05),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(1.1, top_p=0.9, repetition_penalty=0.8),
]
CASES: list[tuple[AnyShape | None, int, bool]] = [
    (None, 1, False),
    (TreeShape(4, 1, 4), 5, True),
    (TreeShape(3, 3, 8), 9, False),
    (TreeShape(8, 4, 20), 21, False),
    (FusedShape(2, 2, 6, 8), 7, False),
    (FusedShape(0, 1, 6, 8), 7, False),
]


READ = [(0, ()), (9, ()), (9, (0, 2))]  # pairs for a draft head, and states that it reads
# Each shape with each way of drawing and with wrong logits, each time for another draft head.
ENDS = [(case, params, "") for case in CASES for params in DRAWN]
ENDS += [
    (case, DRAWN[i], wrong) for case in CASES for i, wrong in ((0, "nan"), (1, "inf"), (5, "nan"))
]
ENDS = [(*end, *READ[i % 3]) for i, end in enumerate(ENDS)]


@pytest.mark.parametrize(("case", "params", "wrong", "width", "aux_layers"), ENDS, ids=str)
def test_the_end_of_a_cycle_leaves_the_same_state(native, case, params, wrong, width, aux_layers):
    shape, rows, chain = case
    generator = torch.Generator().manual_seed(rows)
    counts = set()
    for attempt in range(8):
        tree = random_tree(rows, 60, generator, chain)
        if shape is not None and int(Proposal.of(tree).depths.max()) > shape.depth:
            continue
        if isinstance(shape, FusedShape):
            sources = torch.randint(1, (HEAD | LOOKUP) + 1, (rows,), generator=generator)
            sources[0] = 0
            tree = tree._replace(sources=sources)
        spec = CycleSpec(shape, width, SamplingMode.of(params, 60))
        proposal = Proposal.of(tree, attempt % 2 == 1)  # whether the pending pairs were read
        states = [state_of(native, 40 + attempt, aux_layers=aux_layers) for _ in range(2)]
        output = output_for(tree, native, generator, states[0], wrong)
        for state, end in zip(states, (finish, EAGER.finish), strict=True):
            state.count.fill_(3)
            state.root.fill_(3)
            state.text.fill_(7)  # of another text
            state.features.fill_(0.5)
            state.seen[0, 1::7] = True
            state.sampling.load(dataclasses.replace(params, seed=attempt << 40 | 5))
            end(state, spec, proposal, output)
        one, two = states
        for name in ("seq_len", "root", "count", "text", "result", "seen"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name
        seen = int(one.count)
        if width:  # what follows is padding
            assert torch.equal(one.tokens[:seen], two.tokens[:seen])
            assert torch.equal(one.features[:seen], two.features[:seen])
        end_of_text = int(one.seq_len)
        assert torch.equal(one.cache.rows[:, :, :end_of_text], two.cache.rows[:, :, :end_of_text])
        counts.add(end_of_text - 40 - attempt)
    if shape is not None and not wrong:
        assert len(counts) > 1


def test_tensors_of_a_state_may_be_replaced_between_two_cycles(native):
    """The cache grows with the text, and another drafter reads other features."""
    generator = torch.Generator().manual_seed(0)
    shape, rows, _ = CASES[2]
    spec = CycleSpec(shape, 9, SamplingMode())
    states = [state_of(native, 40) for _ in range(2)]
    for layers in ((), (0, 2)):
        for state in states:
            state.read_aux_layers(layers, native.config.dim)
            state.cache.resize(state.cache.n_slots + 256)
        for _ in range(6):
            tree = random_tree(rows, 60, generator, False)
            if int(Proposal.of(tree).depths.max()) > shape.depth:
                continue
            output = output_for(tree, native, generator, states[0], "")
            states[1].cache.rows.copy_(states[0].cache.rows)  # rows past the text may differ
            for state, end in zip(states, (finish, EAGER.finish), strict=True):
                state.count.zero_()
                end(state, spec, Proposal.of(tree), output)
            one, two = states
            n, seen = int(one.seq_len), int(one.count)
            assert n == int(two.seq_len) > 40
            assert torch.equal(one.cache.rows[:, :, :n], two.cache.rows[:, :, :n])
            assert torch.equal(one.features[:seen], two.features[:seen])


EDGES = [SamplingParams(1.0, top_p=p) for p in (0.001, 0.9999, 1 - 2**-24)]
EDGES += [SamplingParams(1.5, top_k=k) for k in (1, 50)]
EDGES += [SamplingParams(1.5, top_k=1500, min_p=0.3), SamplingParams(2.0, top_k=40, top_p=0.5)]
EDGES += [SamplingParams(100.0, top_k=1500), SamplingParams(2.0, min_p=0.1)]


# Spreads of the logits: from nearly all tokens to one.
@pytest.mark.parametrize(("V", "spread"), [(61, 0.05), (5003, 3.0), (5003, 20.0)])
@pytest.mark.parametrize("params", [*DRAWN[1:], *EDGES], ids=str)
def test_drawn_tokens_are_those_of_sampling(native, V, spread, params):
    """For ties and tokens that a grammar forbids, too, and with any number of threads."""
    spec = CycleSpec(None, 0, SamplingMode.of(params, V))
    generator = torch.Generator().manual_seed(V)
    drawn = set()
    for attempt in range(6):
        logits = spread * torch.randn(1, V, generator=generator)
        if attempt % 3 == 1:
            logits = (2 * logits).round() / 2  # ties
        elif attempt % 3 == 2:
            logits[0, torch.rand(V, generator=generator) < 0.9] = float("-inf")
        if (
            params.greedy and attempt % 2
        ):  # the root's is the largest under its penalty, but not under another one
            logits[0, 0] = 1.5 * logits.max()
        state = state_of(native, 7 + attempt)
        state.sampling.load(dataclasses.replace(params, seed=attempt))
        position = state.seq_len + 1 + torch.zeros(1, dtype=torch.long)
        seen = torch.zeros(1, V, dtype=torch.bool)
        seen[0, :40:3] = True  # the root among them
        expected = int(draw(logits, position, spec.kind, state.sampling, seen))
        for threads in (torch.get_num_threads(), 1):
            before = torch.get_num_threads()
            state.seq_len.fill_(7 + attempt)
            state.root.zero_()
            state.seen = seen.clone()
            torch.set_num_threads(threads)
            finish(state, spec, Proposal.of(state.root_alone()), Output(logits, logits[:, :1]))
            torch.set_num_threads(before)
            assert int(state.root) == expected
        drawn.add(expected)
    assert len(drawn) > 1


RARE = [-10.0] * 5000  # 4.5e-5 of the likeliest each, but many
CLOSE = {
    "equal": ([0.0] * 5003, SamplingParams(1.0)),
    "the most noise": ([0.0] * 4067 + [-15.0] + [0.0] * 935, SamplingParams(1.0, seed=5751)),
    "one more than top-k": ([0.0, 0.1, 0.2], SamplingParams(1.5, top_k=2)),
    "rare ones in top-k": ([0.0] * 3 + RARE, SamplingParams(1.0, top_k=4)),
    "rare ones in top-p": ([0.0, *RARE], SamplingParams(1.0, top_p=0.85)),
}


@pytest.mark.parametrize("name", CLOSE)
def test_tokens_that_are_drawn_by_little_are_those_of_sampling(native, name):
    row, params = CLOSE[name]
    logits, state = torch.tensor([row]), state_of(native, 7)
    spec = CycleSpec(None, 0, SamplingMode.of(params, len(row)))
    # With the seed 5751 token 4067 has a noise of 17.47, whose 1 - v is 1 in fp32.
    for seed in range(params.seed, params.seed + (600 if name == "equal" else 100)):
        state.sampling.load(dataclasses.replace(params, seed=seed))
        state.seq_len.fill_(7)
        expected = draw(logits, state.seq_len.view(1) + 1, spec.kind, state.sampling)
        finish(state, spec, Proposal.of(state.root_alone()), Output(logits, logits[:, :1]))
        assert state.root == expected, seed


@pytest.mark.parametrize("params", DRAWN[1:5], ids=str)
@pytest.mark.parametrize("largest", [3e38, -3e38])
def test_scores_beyond_fp32_are_no_token(native, params, largest):
    """A temperature below one makes infinities of finite logits."""
    params = dataclasses.replace(params, temperature=0.7)
    spec, state = CycleSpec(None, 0, SamplingMode.of(params, 1500)), state_of(native, 5)
    state.sampling.load(params)
    alone, among = torch.full((1, 1500), largest), torch.zeros(1, 1500)
    among[0, 1205] = float("nan") if largest < 0 else largest  # of the second thread
    for logits in (alone, torch.zeros(1, 1500), among):
        finish(state, spec, Proposal.of(state.root_alone()), Output(logits, logits[:, :1]))
        assert (int(state.result[0]) == BAD_ROW) == bool(logits.any())


def test_a_cache_and_a_state_end_with_their_sequence(native):
    """What siblings share keeps neither, and room that is given back is free at once."""
    backend = CpuBackend(native)
    engine = Engine(native, 400, backend=backend)
    list(engine.generate([1, 2, 3], SamplingParams(), 300))
    state, rows = weakref.ref(engine.state), weakref.ref(engine.state.cache.rows)
    engine.give_back()
    gc.collect()
    assert rows() is None, "the larger cache"
    del engine
    gc.collect()
    assert state() is None


def test_logits_in_another_type_are_the_cores(native):
    """Such as those of an LM head in bf16."""
    proposal = Proposal.of(random_tree(4, 60, torch.Generator().manual_seed(0)))
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(1)).bfloat16()
    spec, results = CycleSpec(TreeShape(3, 2, 3), 0, SamplingMode()), []
    for finish in (NativeFinish(), EAGER.finish):
        state = state_of(native, 20)
        finish(state, spec, proposal, Output(logits, logits[:, :1]))
        results.append(state.result.tolist())
    assert results[0] == results[1] and results[0][0] >= 0
