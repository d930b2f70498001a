"""Nodes of one captured cycle of 7B int4, counted without a GPU.

Seen: every kernel that Inductor would generate for the compiled pieces (they are lowered for CUDA
up to the code that launches them), and every launch of our own host code, on tensors that are only
shapes. Not seen: what CUDA adds beside launches (copies and memsets of the driver: none are asked
for), and time. Inductor may fuse differently in other versions of torch: the limits have room.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fasteagle.decoding.cycle import Proposal
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.generate import Engine
from fasteagle.loading.registry import preset
from fasteagle.model import Output
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.interleaved import layout_for
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme
from fasteagle.quant.tiling import Card, split_k
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import PAPER_TREE, FusedShape, TreeShape
from fasteagle.tree import chain
from helpers import eagle3_of, random_head
from interleaved_models import KernelBackend, packed_head, packed_target

pytest.importorskip("triton", reason="Triton is not installed (it comes with torch on Linux)")

from inductor_launches import launches
from launch_counter import block_launches, head_launches

TREE = TreeShape(5, 4, 15)
LLAMA = preset("llama2-7b")
GREEDY = SamplingMode()


def products(N: int, K: int) -> int:
    """Launches of a product whose partial sums no other kernel adds up."""
    layout = layout_for(8, K, K) if LLAMA.vocab_size == N else layout_for(4, 128, K)
    return 1 + (split_k(layout, N, K, Card.like_3090(82)) > 1)


def engine_of(
    make_drafter=lambda head: EagleDrafter(head, TREE, 512),
    algorithm: str = "eagle1",
    dense_lm_head: bool = False,
    int8: bool = False,
):
    """An engine as on CUDA, of a tiny model: its pieces have the operations of a large one's."""
    target, _ = packed_target("mha", vocab_size=64, max_seq_len=512)
    if not dense_lm_head:
        linear = InterleavedLinear(quantize_weight(target.lm_head.weight.float(), Scheme(8)), None)
        target.lm_head = QuantizedLMHead(linear)
    target.bfloat16().init_rope(512, "cpu")
    backend = KernelBackend(target, "int8" if int8 else "auto")
    assert not backend.leaves_blocks
    head, _ = packed_head(random_head(target, eagle3=eagle3_of(algorithm, target.config)))
    drafter = make_drafter(head.bfloat16())
    engine = Engine(target, 512, drafter=drafter, backend=backend)
    engine.reserve(10, TREE.rows, TREE.rows)
    engine.state.count.fill_(1)
    engine.state.seq_len.fill_(2)
    return engine, drafter


@pytest.fixture(scope="module")
def made():
    return engine_of()


def pieces(made, kind: SamplingMode, tree: TreeShape | None) -> dict[str, Counter[str]]:
    """Calls of each piece of a cycle."""
    engine, drafter = made
    state, target = engine.state, engine.model
    spec = engine.spec(tree, kind)
    T = spec.rows
    rows = torch.arange(T)
    proposal = Proposal.of(state.root_alone(1) if tree is None else chain(rows, rows >= 0))
    features = target.norm.weight.new_zeros(T, target.config.dim)
    aux_states = features.float().repeat(1, len(state.aux_layers)) if state.aux_layers else None
    output = Output(torch.zeros(T, target.config.vocab_size), features, aux_states)
    return {
        "draft": launches(engine.runner.usual.draft, state, drafter, spec),
        "verify": launches(engine.runner.usual.verify, state, engine.target, proposal),
        "finish": launches(engine.runner.usual.finish, state, spec, proposal, output),
    }


def nodes(calls: Counter[str], T: int) -> int:
    """Nodes of one piece at 7B: what each call of an op of ours launches there."""
    each = {
        "triton": 1,
        "fasteagle.fused_blocks": block_launches(LLAMA, T, LLAMA.n_layer).total(),
        "fasteagle.fused_head": head_launches(LLAMA, T).total(),
        "fasteagle.interleaved_linear": products(LLAMA.vocab_size, LLAMA.dim),  # LM heads
        "fasteagle.top_children": 2,
        "fasteagle.rerank": 1,
        "fasteagle.relations": 1,
        "fasteagle.rms_norm": 1,
        "fasteagle.move_rows": 1,
    }
    return sum(n * each[name] for name, n in calls.items() if n)


@pytest.mark.slow
def test_nodes_of_a_greedy_cycle(made):
    """Depth 5, top-k 4, 15 nodes. It was about 1,100."""
    calls = pieces(made, GREEDY, TREE)
    found = {piece: nodes(counted, TREE.rows) for piece, counted in calls.items()}
    print("\n", found, sum(found.values()), calls)
    assert calls["draft"]["fasteagle.fused_head"] == TREE.depth
    assert found["verify"] <= 8 * LLAMA.n_layer + 6
    assert found["draft"] <= 82
    assert found["finish"] <= 8
    assert sum(found.values()) <= 350


@pytest.mark.slow
def test_nodes_of_a_plain_cycle(made):
    found = pieces(made, GREEDY, None)
    total = sum(nodes(calls, 1) for calls in found.values())
    print("\n", total, found)
    assert total <= 8 * LLAMA.n_layer + 14


DRAWN = [SamplingMode(greedy=False), SamplingMode(greedy=False, top_p=True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWN, ids=["temperature", "top-p"])
def test_nodes_of_drawing(made, kind):
    """Noise and processing are fused: 463 nodes more they were, and 416 more with top-p."""
    engine, _ = made
    state, spec, rows = engine.state, engine.spec(TREE, kind), torch.arange(TREE.rows)
    features = engine.model.norm.weight.new_zeros(TREE.rows, engine.model.config.dim)
    output = Output(torch.zeros(TREE.rows, 64), features)
    proposal = Proposal.of(chain(rows, rows >= 0))
    found = launches(engine.runner.usual.finish, state, spec, proposal, output)
    print("\n", found)
    assert found.total() <= (60 if kind.top_p else 16)


def fused(head):
    return FusedDrafter(head, FusedShape(3, 3, 8, 6), 512)


def static(head):
    return StaticTreeDrafter(head, 512, PAPER_TREE)


# Calls that other cycles make: in drafting, in a pass, in the finish.
OTHERS = {
    "eagle3": (dict(algorithm="eagle3"), (46, 9, 8)),
    "dense LM head": (dict(dense_lm_head=True), (60, 11, 8)),
    "int8 cache": (dict(int8=True), (32, 6, 8)),
    "fused tree": (dict(make_drafter=fused), (40, 6, 9)),
    "static tree": (dict(make_drafter=static), (32, 6, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_cycles_are_lowered(name):
    """Every operator that a cycle may call has a place in Inductor's code."""
    changes, limits = OTHERS[name]
    engine, drafter = engine_of(**changes)
    found = pieces((engine, drafter), GREEDY, drafter.shape)
    print("\n", name, {piece: (calls.total(), calls) for piece, calls in found.items()})
    for calls, limit in zip(found.values(), limits, strict=True):
        assert calls.total() <= limit
