"""Whole passes and ends of cycles in our CPU kernels: the bits of the code that they stand for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fasteagle.compile.backend import choose_backend
from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.compile.cpu_pass import NativeFinish, why_not
from fasteagle.decoding.cycle import EAGER, Proposal
from fasteagle.decoding.runner import Backend
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.generate import Engine
from fasteagle.loading.source import quantize_
from fasteagle.model import KVCache, Output
from fasteagle.options import SamplingParams
from fasteagle.quant import cpu_build
from fasteagle.quant.cpu_tensors import (
    BlockTensors,
    CorpusIndex,
    HeadTensors,
    Sampling,
    State,
    TargetTensors,
    Tree,
)
from fasteagle.quant.scheme import Scheme
from fasteagle.sampling import BAD_ROW, SamplingMode, draw
from fasteagle.shapes import AnyShape, FusedShape, TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import HEAD, LOOKUP, DraftTree
from helpers import random_target, tiny_config
from native_models import CONFIGS, SHAPE, native_backend, native_target

finish = NativeFinish()


@pytest.fixture(scope="module", autouse=True)
def kernels():
    cpu_build.load()


@pytest.fixture(scope="module")
def target():
    """A target that no test writes into."""
    return native_target(tiny_config(**SHAPE))


def random_tree(T: int, V: int, generator: torch.Generator, chain: bool = False) -> DraftTree:
    """The last rows are padding now and then."""
    parents = torch.zeros(T, dtype=torch.long)
    for j in range(1, T):
        parents[j] = j - 1 if chain else torch.randint(0, j, (1,), generator=generator)
    valid = torch.arange(T) < T - int(torch.randint(0, min(T, 3), (1,), generator=generator))
    tokens = torch.where(valid, torch.randint(0, V, (T,), generator=generator), 0)
    parents = torch.where(valid, parents, 0)
    return DraftTree(tokens, parents, valid)


def state_of(target, seq_len: int, dtype=torch.float32, aux_layers=()) -> DecodeState:
    cache = KVCache(target.config, 256, dtype, "cpu")
    g = torch.Generator().manual_seed(seq_len)
    cache.rows.copy_(torch.randn(cache.rows.shape, generator=g))
    state = DecodeState(target, cache, 200)
    state.read_aux_layers(aux_layers, target.config.dim)
    state.seq_len.fill_(seq_len)
    return state


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("T", "length"), [(1, 140), (2, 1), (9, 70), (32, 140)])
def test_a_pass_has_the_bits_of_its_parts(name, dtype, T, length):
    backend = native_backend(tiny_config(**CONFIGS[name]), dtype=dtype)
    assert why_not(backend.target.model) is None
    verify, target = backend.pieces.verify, backend.target
    generator = torch.Generator().manual_seed(T + length)
    proposal = Proposal.of(random_tree(T, 60, generator))
    for aux_layers in ((), (0, 1, 2)):
        one, two = (state_of(target.model, length, dtype, aux_layers) for _ in range(2))
        output, expected = verify(one, target, proposal), EAGER.verify(two, target, proposal)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.features, expected.features)
        assert output.features.dtype == expected.features.dtype == dtype
        assert (output.aux_states is None) == (expected.aux_states is None) == (not aux_layers)
        assert not aux_layers or torch.equal(output.aux_states, expected.aux_states)
        assert torch.equal(one.cache.rows, two.cache.rows)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_pass_of_several_sequences_has_the_bits_of_their_own(name, dtype):
    """Texts of other lengths, caches of other sizes, more rows than one call takes."""
    backend = native_backend(tiny_config(**CONFIGS[name]), dtype=dtype)
    verify, target = backend.pieces.verify, backend.target
    generator = torch.Generator().manual_seed(1)
    sizes = [(1, 140), (9, 1), (3, 70), (1, 5), (17, 130), (5, 64), (32, 40), (2, 2)]
    proposals = [Proposal.of(random_tree(T, 60, generator)) for T, _ in sizes]
    for aux_layers in ((), (0, 2)):
        alone, together = (
            [state_of(target.model, length, dtype, aux_layers) for _, length in sizes]
            for _ in range(2)
        )
        together[0].cache.resize(512)
        outputs = backend.verify_together(together, proposals)
        for i, proposal in enumerate(proposals):
            expected = verify(alone[i], target, proposal)
            assert torch.equal(outputs[i].logits, expected.logits), i
            assert torch.equal(outputs[i].features, expected.features)
            assert (outputs[i].aux_states is None) == (not aux_layers)
            assert not aux_layers or torch.equal(outputs[i].aux_states, expected.aux_states)
            rows = together[i].cache.rows[:, :, :256]
            assert torch.equal(rows, alone[i].cache.rows)


def test_sequences_that_do_not_fit_one_pass_are_refused(target):
    native = CpuBackend(target).pieces.verify._target
    trees = [random_tree(17, 60, torch.Generator().manual_seed(i)) for i in range(2)]
    states = [state_of(target, 5) for _ in trees]

    def run(n=2, caches=None):
        proposals = [Proposal.of(tree) for tree in trees]
        caches = caches or [state.cache.rows for state in states]
        native.run_together(
            [tree.tokens for tree in trees[:n]],
            [state.seq_len for state in states],
            [proposal.paths for proposal in proposals],
            [proposal.depths for proposal in proposals],
            caches,
            [],
            target.norm.weight,
        )

    with pytest.raises(RuntimeError, match="34 rows"):
        run()
    with pytest.raises(RuntimeError, match="a tree and a cache of each sequence"):
        run(1)
    with pytest.raises(RuntimeError, match="caches of one type"):
        run(caches=[states[0].cache.rows, states[1].cache.rows.bfloat16()])


def test_more_rows_than_one_call_takes():
    backend = native_backend(tiny_config(**SHAPE))
    target, model = backend.target, backend.target.model
    proposal = Proposal.of(random_tree(40, 60, torch.Generator().manual_seed(0)))
    one, two = state_of(model, 50), state_of(model, 50)
    output = backend.pieces.verify(one, target, proposal)
    assert torch.equal(output.logits, EAGER.verify(two, target, proposal).logits)


def test_what_cannot_be_read_is_refused(target):
    verify = CpuBackend(target).pieces.verify
    tree = random_tree(4, 60, torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="slot 256 of 256"):
        verify(state_of(target, 253), target, Proposal.of(tree))
    wrong = tree._replace(tokens=tree.tokens + 60)
    with pytest.raises(RuntimeError, match=r"token \d+"):
        verify(state_of(target, 5), target, Proposal.of(wrong))


def test_what_does_not_fit_the_pass_is_refused(target):
    native = CpuBackend(target).pieces.verify
    tree = random_tree(4, 60, torch.Generator().manual_seed(0))
    proposal = Proposal.of(tree)
    state = state_of(target, 5)

    def run(**changes):
        arguments = {
            "tokens": tree.tokens,
            "seq_len": state.seq_len,
            "paths": proposal.paths,
            "depths": proposal.depths,
            "rows": state.cache.rows,
            "aux_layers": [],
            "like": target.norm.weight,
        }
        return native._target.run(*(arguments | changes).values())

    run()
    with pytest.raises(RuntimeError, match="position 6 of 6|slot|position"):
        small = native_target(tiny_config(**SHAPE))
        small.rope_cos, small.rope_sin = small.rope_cos[:5], small.rope_sin[:5]
        CpuBackend(small).pieces.verify(state_of(small, 5), small, proposal)
    for changes, message in (
        ({"tokens": torch.zeros(8, dtype=torch.long)[::2]}, "tree"),
        ({"paths": proposal.paths.flatten()}, "tree"),
        ({"depths": proposal.depths + proposal.paths.shape[1]}, "depth"),
        ({"rows": state.cache.rows.half()}, "caches in bf16 or fp32"),
        ({"rows": state.cache.rows[:, :1].contiguous()}, "cache"),
        ({"like": target.norm.weight.half()}, "features in fp32 or bf16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**changes)


def test_what_does_not_fit_the_end_of_a_cycle_is_refused(target):
    state, T = state_of(target, 5), 4
    arguments = {"logits": torch.zeros(T, 60), "read": torch.zeros(T, 64)}
    tree = Tree(torch.zeros(T).long(), torch.zeros(T).long(), torch.ones(T).bool())
    memory = State(
        seq_len=state.seq_len,
        root=state.root,
        count=state.count,
        tokens=torch.zeros(9).long(),
        features=torch.zeros(9, 64),
        text=torch.zeros(99).long(),
        result=torch.zeros(9).long(),
        rows=state.cache.rows,
    )

    def run(arguments=arguments, tree=tree, memory=memory):
        state.seq_len.fill_(5)
        state.count.fill_(1)
        torch.ops.fasteagle_cpu.finish_cycle(
            **arguments,
            tree=tree,
            state=memory,
            sampling=Sampling(),
            depth=1,
            in_place=False,
            extends=True,
            keeps=True,
        )

    run()
    half, other = torch.zeros(T, 64).half(), torch.zeros(2)
    for changes, message in (
        ({"arguments": arguments | {"logits": torch.zeros(T * 60)}}, "a state and a tree"),
        ({"arguments": arguments | {"read": half}}, "x in fp32 or bf16"),
        ({"arguments": arguments | {"read": torch.zeros(T, 128)[:, ::2]}}, r"x is \[T, 64\]"),
        ({"tree": tree._replace(tokens=torch.zeros(2 * T).long()[::2])}, "for each row"),
        ({"tree": tree._replace(parents=tree.parents[:2])}, "for each row"),
        ({"tree": tree._replace(valid=tree.valid[:2])}, "for each row"),
        ({"tree": tree._replace(sources=tree.parents[:2])}, "for each row"),
        ({"tree": tree[:3]}, "4 tensors: tokens parents valid sources"),
        ({"memory": memory._replace(tokens=torch.zeros(1).long())}, "room for pairs"),
        ({"memory": memory._replace(features=torch.zeros(9, 64).half())}, "x in fp32 or bf16"),
        ({"memory": memory._replace(text=torch.zeros(198).long()[::2])}, "contiguous state"),
        ({"memory": [*memory, other]}, "8 tensors: seq_len root count"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**changes)


def test_lists_of_tensors_have_one_order_in_python_and_in_cpp():
    types = (BlockTensors, TargetTensors, HeadTensors, State, Tree, Sampling, CorpusIndex)
    expected = {named.__name__: " ".join(named._fields) for named in types}
    assert torch.ops.fasteagle_cpu.fields() == expected


def test_other_targets_keep_their_code():
    target = random_target(tiny_config(**SHAPE))
    assert choose_backend(target).pieces == EAGER
    quantize_(target.blocks, Scheme(8), native=True)
    backend = choose_backend(target)
    pieces = backend.pieces
    assert pieces.verify is EAGER.verify and isinstance(pieces.finish, NativeFinish)
    assert "LM head by torch: its LM head is not quantized" in backend.describe()


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


ENDS = [(case, params, "") for case in CASES for params in DRAWN]
ENDS += [(case, DRAWN[i], wrong) for case in CASES for i in (0, 1) for wrong in ("nan", "inf")]


@pytest.mark.parametrize(("width", "aux_layers"), [(0, ()), (9, ()), (9, (0, 2))])
@pytest.mark.parametrize(("case", "params", "wrong"), ENDS, ids=str)
def test_the_end_of_a_cycle_leaves_the_same_state(target, case, width, wrong, aux_layers, params):
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
        spec = CycleSpec(shape, rows, width, SamplingMode.of(params, 60))
        proposal = Proposal.of(tree)
        states = [state_of(target, 40 + attempt, aux_layers=aux_layers) for _ in range(2)]
        output = output_for(tree, target, generator, states[0], wrong)
        for state, end in zip(states, (finish, EAGER.finish), strict=True):
            state.count.fill_(3)
            state.features.fill_(0.5)
            state.seen[0, ::7] = True
            state.sampling.load(dataclasses.replace(params, seed=attempt << 40 | 5))
            end(state, spec, proposal, output)
        one, two = states
        for name in ("seq_len", "root", "count", "text", "result", "seen"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name
        seen = int(one.count)
        if width:  # what lies behind is padding
            assert torch.equal(one.tokens[:seen], two.tokens[:seen])
            assert torch.equal(one.features[:seen], two.features[:seen])
        end_of_text = int(one.seq_len)
        assert torch.equal(one.cache.rows[:, :, :end_of_text], two.cache.rows[:, :, :end_of_text])
        counts.add(end_of_text - 40 - attempt)
    if shape is not None and not wrong:
        assert len(counts) > 1


def test_tensors_of_a_state_may_be_replaced_between_two_cycles(target):
    """The cache grows with the text, and another drafter reads other features."""
    generator = torch.Generator().manual_seed(0)
    shape, rows, _ = CASES[2]
    spec = CycleSpec(shape, rows, 9, SamplingMode())
    states = [state_of(target, 40) for _ in range(2)]
    for layers in ((), (0, 2)):
        for state in states:
            state.read_aux_layers(layers, target.config.dim)
            state.cache.resize(state.cache.n_slots + 256)
        for _ in range(6):
            tree = random_tree(rows, 60, generator, False)
            if int(Proposal.of(tree).depths.max()) > shape.depth:
                continue
            output = output_for(tree, target, generator, states[0], "")
            states[1].cache.rows.copy_(states[0].cache.rows)  # rows past the text may differ
            for state, end in zip(states, (finish, EAGER.finish), strict=True):
                state.count.zero_()
                end(state, spec, Proposal.of(tree), output)
            one, two = states
            n, seen = int(one.seq_len), int(one.count)
            assert n == int(two.seq_len) > 40
            assert torch.equal(one.cache.rows[:, :, :n], two.cache.rows[:, :, :n])
            assert torch.equal(one.features[:seen], two.features[:seen])


@pytest.mark.parametrize("V", [61, 5003])
@pytest.mark.parametrize("spread", [0.05, 3.0, 20.0])  # of the logits: from nearly all to one token
@pytest.mark.parametrize(
    "params",
    [
        *DRAWN[1:],
        SamplingParams(1.0, top_p=0.001),
        SamplingParams(1.0, top_p=0.9999),
        SamplingParams(1.5, top_k=1),
        SamplingParams(1.5, top_k=50),
        SamplingParams(1.5, top_k=1500, min_p=0.3),
        SamplingParams(100.0, top_k=1500),
        SamplingParams(2.0, min_p=0.1),
    ],
    ids=str,
)
def test_drawn_tokens_are_those_of_sampling(target, V, spread, params):
    """For ties and tokens that a grammar forbids, too, and with any number of threads."""
    spec = CycleSpec(None, 1, 0, SamplingMode.of(params, V))
    generator = torch.Generator().manual_seed(V)
    drawn = set()
    for attempt in range(6):
        logits = spread * torch.randn(1, V, generator=generator)
        if attempt % 3 == 1:
            logits = (2 * logits).round() / 2  # ties
        elif attempt % 3 == 2:
            logits[0, torch.rand(V, generator=generator) < 0.9] = float("-inf")
        state = state_of(target, 7 + attempt)
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
            finish(state, spec, Proposal.of(state.root_alone(1)), Output(logits, logits[:, :1]))
            torch.set_num_threads(before)
            assert int(state.root) == expected
        drawn.add(expected)
    assert len(drawn) > 1


@pytest.mark.parametrize("params", DRAWN[1:5], ids=str)
@pytest.mark.parametrize("largest", [3e38, -3e38])
def test_scores_beyond_fp32_are_no_token(target, params, largest):
    """A temperature below one makes infinities of finite logits."""
    params = dataclasses.replace(params, temperature=0.7)
    spec, state = CycleSpec(None, 1, 0, SamplingMode.of(params, 60)), state_of(target, 5)
    state.sampling.load(params)
    logits = torch.full((1, 60), largest)
    finish(state, spec, Proposal.of(state.root_alone(1)), Output(logits, logits[:, :1]))
    assert int(state.result[0]) == BAD_ROW


def test_what_the_kernels_do_not_do_is_done_by_the_cycle(target):
    params = SamplingParams(0.8, top_p=0.9, seed=3)
    penalty = SamplingParams(0.8, repetition_penalty=1.2)
    for drawn in (SamplingParams(), params, SamplingParams(repetition_penalty=1.2), penalty):
        texts = []
        for native in (False, True):
            backend = CpuBackend(target)
            if not native:
                backend = Backend(backend.target)
            engine = Engine(target, 200, drafter=NgramDrafter(4), backend=backend)
            text = [t for new in engine.generate([1, 2, 3, 1, 2], drawn, 60) for t in new]
            texts.append((text, engine.stats.path_lengths, engine.stats.drafted))
        assert texts[0] == texts[1]
