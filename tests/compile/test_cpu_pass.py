"""Whole passes in our CPU kernels: the bits of the code that they stand for."""

from __future__ import annotations

import pytest
import torch

from fasteagle.compile import cpu_pass
from fasteagle.compile.backend import choose_backend
from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.compile.cpu_blocks import MAX_ROWS
from fasteagle.compile.cpu_pass import NativeFinish, why_not
from fasteagle.decoding.cycle import EAGER
from fasteagle.decoding.together import groups
from fasteagle.loading.source import quantize_
from fasteagle.quant.cpu_linear import NativeLinear
from fasteagle.quant.cpu_tensors import (
    BlockTensors,
    CorpusIndex,
    DraftTensors,
    HeadTensors,
    Sampling,
    State,
    TargetTensors,
    Tree,
)
from fasteagle.quant.scheme import Scheme
from fasteagle.tree import Proposal
from helpers import random_target, tiny_config
from native_models import CONFIGS, SHAPE, native_backend, native_target, random_tree, state_of

pytestmark = pytest.mark.usefixtures("cpu_kernels")


# Each model with two numbers of rows T after a text, one of them in bf16.
PASSES = [(1, 140), (2, 1), (9, 70), (32, 140)]
PASSES = [
    (name, dtype, *PASSES[(i + 2 * j + i // 4) % 4])
    for i, name in enumerate(CONFIGS)
    for j, dtype in enumerate((torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("name", "dtype", "T", "length"), PASSES, ids=str)
def test_a_pass_has_the_bits_of_its_parts(name, dtype, T, length):
    backend = native_backend(tiny_config(**CONFIGS[name]), dtype=dtype)
    assert why_not(backend.target.model) is None and ": passes, chains" in backend.describe()
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
def test_a_pass_of_several_sequences_has_the_bits_of_their_own(name):
    """Texts of other lengths, caches of other sizes, more rows than one call takes."""
    dtype = torch.float32 if [*CONFIGS].index(name) % 2 else torch.bfloat16
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


def test_sequences_that_do_not_fit_one_pass_are_refused(native):
    own = CpuBackend(native).pieces.verify._target
    trees = [random_tree(17, 60, torch.Generator().manual_seed(i)) for i in range(2)]
    states = [state_of(native, 5) for _ in trees]

    def run(n=2, caches=None):
        proposals = [Proposal.of(tree) for tree in trees]
        caches = caches or [state.cache.rows for state in states]
        own.run_together(
            [tree.tokens for tree in trees[:n]],
            [state.seq_len for state in states],
            [proposal.paths for proposal in proposals],
            [proposal.depths for proposal in proposals],
            caches,
            [],
            native.norm.weight,
        )

    with pytest.raises(RuntimeError, match="34 rows"):
        run()
    with pytest.raises(RuntimeError, match="a tree and a cache of each sequence"):
        run(1)
    with pytest.raises(RuntimeError, match="caches of one type"):
        run(caches=[states[0].cache.rows, states[1].cache.rows.bfloat16()])


def test_more_rows_than_one_call_takes(monkeypatch):
    backend, by_parts = native_backend(tiny_config(**SHAPE)), []
    target, model = backend.target, backend.target.model
    eager = EAGER._replace(verify=lambda *args: by_parts.append(args) or EAGER.verify(*args))
    monkeypatch.setattr(cpu_pass, "EAGER", eager)
    for rows in (MAX_ROWS, 40):
        proposal = Proposal.of(random_tree(rows, 60, torch.Generator().manual_seed(0)))
        one, two = state_of(model, 50), state_of(model, 50)
        output = backend.pieces.verify(one, target, proposal)
        assert torch.equal(output.logits, EAGER.verify(two, target, proposal).logits)
        assert len(by_parts) == (rows > MAX_ROWS)


def test_as_many_sequences_share_a_pass_as_fit():
    sizes = [3, 5, 1, 9, 2, 2, 4]
    assert [*groups(sizes, 8)] == [(0, 2), (2, 3), (3, 4), (4, 7)]
    assert [*groups(sizes, 8, 2)] == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]


def test_what_cannot_be_read_is_refused(native):
    verify = CpuBackend(native).pieces.verify
    tree = random_tree(4, 60, torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="slot 256 of 256"):
        verify(state_of(native, 253), native, Proposal.of(tree))
    wrong = tree._replace(tokens=tree.tokens + 60)
    with pytest.raises(RuntimeError, match=r"token \d+"):
        verify(state_of(native, 5), native, Proposal.of(wrong))


def test_what_does_not_fit_the_pass_is_refused(native):
    own = CpuBackend(native).pieces.verify
    tree = random_tree(4, 60, torch.Generator().manual_seed(0))
    proposal = Proposal.of(tree)
    state = state_of(native, 5)

    def run(**changes):
        arguments = dict(tokens=tree.tokens, seq_len=state.seq_len, paths=proposal.paths)
        arguments |= dict(depths=proposal.depths, rows=state.cache.rows, aux_layers=[])
        arguments["like"] = native.norm.weight
        *tensors, aux_layers, like = (arguments | changes).values()
        return own._target.run_together(*([tensor] for tensor in tensors), aux_layers, like)

    run()
    with pytest.raises(RuntimeError, match="position 6 of 6|slot|position"):
        small = native_target(tiny_config(**SHAPE))
        small.rope_cos, small.rope_sin = small.rope_cos[:5], small.rope_sin[:5]
        CpuBackend(small).pieces.verify(state_of(small, 5), small, proposal)
    for changes, message in (
        ({"tokens": torch.zeros(8, dtype=torch.long)[::2]}, "tree"),
        ({"paths": proposal.paths.flatten()}, "tree"),
        ({"depths": proposal.depths + proposal.paths.shape[1]}, "depth"),
        ({"rows": state.cache.rows.half()}, "caches in fp32, bf16 or 8 bits"),
        ({"rows": state.cache.rows.char()}, "cache"),
        ({"rows": state.cache.rows[:, :1].contiguous()}, "cache"),
        ({"like": native.norm.weight.half()}, "features in fp32 or bf16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**changes)


def test_all_weights_of_a_target_are_in_one_memory():
    """Of huge pages where there are any."""
    modules = native_backend(tiny_config(**SHAPE)).target.model.modules()
    packed = [module.packed for module in modules if isinstance(module, NativeLinear)]
    assert len(packed) > 4
    assert len({tensor.untyped_storage().data_ptr() for tensor in packed}) == 1


def test_lists_of_tensors_have_one_order_in_python_and_in_cpp():
    types = (BlockTensors, TargetTensors, HeadTensors, State, Tree, Sampling, CorpusIndex)
    types += (DraftTensors,)
    expected = {named.__name__: " ".join(named._fields) for named in types}
    assert torch.ops.fasteagle_cpu.fields() == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda target: target.embedding.half(), "its features are neither fp32 nor bf16"),
        (lambda target: target.norm.half(), "its features are neither fp32 nor bf16"),
        (
            lambda target: setattr(target.lm_head.linear, "bias", torch.zeros(60)),
            "its LM head is not quantized in their layout",
        ),
    ],
)
def test_parts_that_whole_passes_do_not_read(change, reason):
    target = native_target(tiny_config(**SHAPE))
    assert why_not(target) is None
    change(target)
    assert why_not(target) == reason


def test_other_targets_keep_their_code():
    target = random_target(tiny_config(**SHAPE))
    assert choose_backend(target).pieces == EAGER
    quantize_(target.blocks, Scheme(8), native=True)
    backend = choose_backend(target)
    pieces = backend.pieces
    assert pieces.verify is EAGER.verify and isinstance(pieces.finish, NativeFinish)
    assert "LM head by torch: its LM head is not quantized" in backend.describe()
    assert ": decoder blocks, chains" in backend.describe()
