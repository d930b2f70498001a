"""Attention of tree rows: the path table, the op and, on a GPU, its results.

`test_interpreted_attention.py` has results without one.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from fasteagle import model
from fasteagle.compile import int8_cache
from fasteagle.compile.int8_cache import dense_rows, quantized_rows
from fasteagle.compile.tree_attention import (
    attend,
    causal_attention,
    fused_attention,
    has_kernel,
    prompt_attention,
    reference,
    tree_attention,
)
from fasteagle.tree import ancestor_mask, tree_paths
from helpers import tiny_config
from tree_problems import Problem, assert_close, problem, random_parents, sdpa


def plain_mask(parents: list[int], seq_len: int, n_slots: int, window: int | None) -> Tensor:
    """Who sees what, row by row and key by key."""
    mask = torch.zeros(len(parents), n_slots, dtype=torch.bool)
    for j in range(len(parents)):
        path = [j]
        while path[-1]:
            path.append(parents[path[-1]])
        slots = [*range(seq_len), *(seq_len + row for row in reversed(path))]
        mask[j, slots[-window:] if window else slots] = True
    return mask


@pytest.mark.parametrize("window", [None, 1, 3, 20, 100])
@pytest.mark.parametrize(("T", "seq_len", "spread"), [(1, 0, 1), (7, 0, 3), (9, 30, 1), (33, 5, 9)])
def test_a_view_means_this_mask(T, seq_len, spread, window):
    view = problem(T, seq_len, spread=spread, window=window).view
    parents = random_parents(T, seq_len, spread).tolist()
    expected = plain_mask(parents, seq_len, 80, window)
    assert torch.equal(view.mask(80), expected)
    some = slice(T // 2, None)  # as a drafter's level, whose rows are not the tree's first
    part = view._replace(paths=view.paths[some], depths=view.depths[some])
    assert torch.equal(part.mask(80), expected[some])


def test_padding_rows_see_the_prefix_and_themselves():
    valid = torch.tensor([True, True, False, False])
    tree_mask, depths = ancestor_mask(torch.tensor([0, 0, 1, 0]), valid)
    assert tree_paths(tree_mask, depths, 1).tolist() == [[0, 0], [0, 1], [2, 0], [3, 0]]


def test_attend_takes_a_mask_or_a_view():
    p = problem(7, 20, group=3, G=2)._replace()
    k, v = torch.nan_to_num(p.k), torch.nan_to_num(p.v)
    mask = p.view.mask(k.shape[1])
    expected = model.attend(p.q, k, v, mask)
    assert torch.equal(attend(p.q, k, v, mask), expected)
    assert_close(attend(p.q, k, v, p.view), expected)
    assert torch.equal(attend(p.q, p.k, p.v, p.view), reference(*p))
    assert_close(p.run(tree_attention), sdpa(p))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_of_a_prompt(group, window):
    """What CUDA runs for a prompt, against the plain products."""
    T, S, G, E = 19, 64, 2, 16
    q, k, v = torch.randn(G, group * T, E), torch.randn(G, S, E), torch.randn(G, S, E)
    mask = model.causal_mask(30, T, S, window, "cpu")
    result = fused_attention(q, k, v, mask)
    torch.testing.assert_close(result, model.attend(q, k, v, mask))
    assert torch.equal(attend(q, k, v, mask), model.attend(q, k, v, mask)), "the CPU's own way"


def test_op_is_described_to_the_compiler():
    p = problem(7, 20, group=3, G=2)
    clean = p._replace(k=torch.nan_to_num(p.k), v=torch.nan_to_num(p.v))
    torch.library.opcheck(tree_attention, (*clean[:3], *p.view[:3], 9))


def test_op_in_a_full_graph_as_the_text_grows():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(p: Problem) -> Tensor:
        return attend(p.q * 2, p.k, p.v, p.view) + 1

    p = problem(7, 41, group=3, n_slots=64)
    for seq_len, stance in ((20, "default"), (41, "fail_on_recompile")):
        p = p._replace(view=p.view._replace(seq_len=torch.tensor(seq_len)))
        with torch.compiler.set_stance(stance):
            assert torch.equal(step(p), attend(p.q * 2, p.k, p.v, p.view) + 1)


@pytest.mark.parametrize("begin", [0, 30])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_of_a_text_needs_no_mask(group, int8, begin, monkeypatch):
    """What CUDA runs, and the CPU's own way, of 64 slots those with keys of a text's."""
    T, S, G, E = 19, 64, 2, 16
    n = begin + T
    q, k, v = torch.randn(G, group * T, E), torch.randn(G, S, E), torch.randn(G, S, E)
    if int8:
        k, v = quantized_rows(k), quantized_rows(v)
    own_k, own_v = (dense_rows(cache[:, :n], q.dtype) for cache in (k, v))
    expected = model.attend(q, own_k, own_v, model.causal_mask(begin, T, n, None, "cpu"))
    view = model.PromptView(T, torch.arange(n))
    assert torch.equal(attend(q, k, v, view), expected)
    masks, attention = [], F.scaled_dot_product_attention

    def recorded(q, k, v, mask, is_causal):
        masks.append(mask)
        if mask is not None:
            mask = mask._materialize()
        return attention(q, k, v, mask, is_causal=is_causal)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    torch.testing.assert_close(causal_attention(q, own_k, own_v, T), expected)
    assert len(masks) == 1 and (isinstance(masks[0], CausalBias) if begin else masks[0] is None)


@pytest.mark.parametrize("n_slots, n_keys", [(512, 256), (256, 256), (100, 100)])
def test_mask_of_a_prompt(n_slots, n_keys):
    """For those who take no view: over its own keys, rounded up as far as there are slots."""
    mask = model.as_mask(model.PromptView(70, torch.arange(70)), n_slots)
    assert torch.equal(mask, model.causal_mask(0, 70, n_keys, None, "cpu"))
    mask = model.as_mask(model.PromptView(30, torch.arange(70)), n_slots)
    assert torch.equal(mask, model.causal_mask(40, 30, n_keys, None, "cpu"))


@pytest.mark.parametrize("int8", [False, True])
def test_a_prompt_reads_the_keys_of_its_mask_alone(int8):
    """32 of 96 slots; those after them hold NaN."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 16, generator=generator) for n in (15, 96, 96))
    mask = model.causal_mask(20, 5, 32, None, "cpu")
    expected = model.attend(q, k[:, :32].contiguous(), v[:, :32].contiguous(), mask)
    k[:, 32:] = v[:, 32:] = float("nan")
    if int8:
        k, v = (quantized_rows(cache.nan_to_num(9.0)) for cache in (k, v))
    ways = [prompt_attention, int8_cache.attend, *([] if int8 else [model.attend])]
    for way in ways:
        assert torch.allclose(way(q, k, v, mask), expected, atol=0.1 if int8 else 1e-6)


def test_prompts_do_without_the_kernels_of_cudnn(monkeypatch):
    """With a mask, in compiled code too, and without one."""
    q, k, v = (torch.randn(2, n, 16) for n in (15, 32, 32))
    arguments = q, k, v, model.causal_mask(20, 5, 32, None, "cpu")
    compiled = torch.compile(fused_attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), fused_attention(*arguments))
    used, attention = [], F.scaled_dot_product_attention

    def recorded(*args, **options):
        used.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    fused_attention(*arguments)
    causal_attention(q, q, q, 15)
    assert used == [False, False] and torch.backends.cuda.cudnn_sdp_enabled() == before


def test_the_result_while_tracing_has_the_shape_of_the_queries():
    p = problem(7, 20)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v, *view = (mode.from_tensor(t) for t in (*p[:3], *p.view[:3]))
        assert tree_attention(q, k, v, *view).shape == q.shape


@pytest.mark.parametrize(
    ("dtype", "head_dim", "runs"),
    [(torch.float16, 16, True), (torch.bfloat16, 256, True), (torch.float32, 64, False)]
    + [(torch.float16, head_dim, False) for head_dim in (8, 512)],
)
def test_other_models_are_left_to_the_core(dtype, head_dim, runs):
    config = dataclasses.replace(tiny_config(), head_dim=head_dim)
    assert has_kernel(config, dtype, torch.device("cuda")) == runs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("E", "group"), [(64, 3), (80, 1), (128, 1), (128, 4), (128, 20), (256, 2)]
)
def test_results_on_the_device(E, group, window, dtype):
    for T in (1, 7, 16, 33, 64):
        for seq_len in (0, 1, 63, 64, 255, 256, 700, 2000):
            p = problem(T, seq_len, E=E, group=group, G=2, dtype=dtype, window=window).to("cuda")
            assert_close(p.run(tree_attention), sdpa(p))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("E", "group", "spread"), [(64, 3, 5), (128, 1, 1), (128, 4, 5), (80, 8, 3)]
)
def test_rows_on_the_device_have_the_bits_of_plain_decoding(E, group, spread, window, dtype):
    for seq_len in (0, 1, 63, 230, 256, 700, 2000):
        p = problem(64, seq_len, E=E, group=group, G=2, spread=spread, dtype=dtype, window=window)
        p = p.to("cuda")
        whole = p.run(tree_attention)
        for j in range(64):
            assert torch.equal(p.row(j).run(tree_attention)[:, :, 0], whole[:, :, j]), (seq_len, j)
        for T in (8, 16, 17, 32):
            part = p.rows(torch.arange(T, device="cuda")).run(tree_attention)
            assert torch.equal(part, whole[:, :, :T]), (seq_len, T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("E", "group"), [(64, 3), (80, 1), (128, 4)])
def test_a_cache_in_8_bits_on_the_device(E, group, dtype):
    """Rows have the bits of plain decoding, which differ from those of a dense cache."""
    for seq_len in (0, 63, 300, 2000):
        p = problem(16, seq_len, E=E, group=group, G=2, dtype=dtype).to("cuda").in_8_bits()
        dense = p._replace(k=dense_rows(p.k, dtype), v=dense_rows(p.v, dtype))
        whole = p.run(tree_attention)
        assert_close(whole, dense.run(tree_attention))
        for j in range(16):
            assert torch.equal(p.row(j).run(tree_attention)[:, :, 0], whole[:, :, j]), (seq_len, j)


@pytest.mark.gpu
def test_a_replayed_graph_sees_the_text_grow():
    problems = [
        problem(16, seq_len, group=4, G=2, n_slots=1024).to("cuda") for seq_len in (10, 255, 700)
    ]
    P = max(p.view.paths.shape[1] for p in problems)
    static = problems[0]
    paths = torch.zeros(16, P, dtype=torch.int32, device="cuda")
    static = static._replace(view=static.view._replace(paths=paths))

    def load(p: Problem) -> None:
        for target, source in zip(static[:3], p[:3], strict=True):
            target.copy_(source)
        static.view.seq_len.copy_(p.view.seq_len)
        static.view.depths.copy_(p.view.depths)
        paths.zero_()[:, : p.view.paths.shape[1]] = p.view.paths

    seq_len, depths = static.view.seq_len.clone(), static.view.depths.clone()
    view = static.view._replace(
        seq_len=seq_len, paths=problems[0].view.paths.clone(), depths=depths
    )
    q, k, v = (tensor.clone() for tensor in static[:3])
    problems[0] = problems[0]._replace(q=q, k=k, v=v, view=view)
    load(problems[0])
    static.run(tree_attention)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = static.run(tree_attention)
    for p in (*problems, problems[0]):
        load(p)
        graph.replay()
        assert torch.equal(result, p.run(tree_attention)), int(p.view.seq_len)
