"""Decoder blocks on CUDA: what is launched and, on a GPU, the results.

`test_interpreted_blocks.py` has results without one.
"""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from torch import nn

from device_checks import (
    check_blocks,
    check_draw,
    check_fuse,
    check_lookup,
    check_order,
    check_step_of_head,
)
from fasteagle.compile import cuda_backend, cuda_blocks, cuda_ops, fixed_norm, tree_attention
from fasteagle.compile.cuda_blocks import MAX_ROWS
from fasteagle.compile.int8_cache import core_target, dense_rows
from fasteagle.compile.kernels import block_kernels, expert_kernels, tree_kernels
from fasteagle.config import MoEConfig
from fasteagle.decoding.cycle import EAGER
from fasteagle.drafting.base import top_children
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.model import CORE, KVCache, RMSNorm, Target
from fasteagle.quant import kernels
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import TreeShape
from fasteagle.tree import Pool, TreeView, fuse, rerank
from helpers import random_head, random_target, tiny_config
from interleaved_models import (
    CONFIGS,
    SHAPE,
    KernelBackend,
    fused_target,
    pack_,
    pack_lm_head_,
    packed_target,
    passed,
)

HALF = torch.float16


@pytest.mark.parametrize("name", ["mha", "qwen3", "shared expert"])
def test_what_a_row_is_summed_by_does_not_depend_on_their_number(name, monkeypatch):
    """Warps and constants of every launch, but for rows of a block and buffers for loads."""
    launches = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            assert all(size >= 1 for size in grid)
            return lambda *args, **options: launches.append((self.name, options))

    for module in (kernels, block_kernels, expert_kernels, tree_kernels):
        for kernel in [each for each in vars(module) if each.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Kernel(kernel))
    monkeypatch.setattr(cuda_blocks, "fused_blocks", cuda_blocks.launch_blocks)
    monkeypatch.setattr(fixed_norm, "rms_norm", by_the_core)
    target, lists = fused_target(packed_target(name)[0]), {}
    for T in (1, 2, 9):
        launches.clear()
        passed(target, T)
        assert all(made["num_warps"] and not made["enable_fp_fusion"] for _, made in launches)
        lists[T] = [
            (kernel, {key: made[key] for key in made.keys() - {"BLOCK_M", "STAGES"}})
            for kernel, made in launches
        ]
    assert lists[1] == lists[2] == lists[9] and lists[1]


def test_operators_find_weights_while_anyone_runs_them():
    """A pass is traced with the blocks of a drafter that is gone when the pass runs."""
    target = fused_target(packed_target("gqa")[0])
    shared = target.ops.run_blocks.__self__.shared
    other = cuda_blocks.FusedBlocks(list(target.model.blocks))
    assert other.shared is shared
    del other
    address = shared.key.data_ptr()
    gc.collect()
    assert cuda_blocks._LIVING[address] is shared
    del target, shared
    gc.collect()
    assert address not in cuda_blocks._LIVING


def test_blocks_that_add_up_in_another_way_have_settings_of_their_own():
    model, _ = packed_target(accumulate="fp16")
    first = cuda_blocks.FusedBlocks(list(model.blocks)).shared
    for module in model.modules():
        if isinstance(module, InterleavedLinear):
            module.sum_in_fp32()
    second = cuda_blocks.FusedBlocks(list(model.blocks)).shared
    assert (first.settings.accumulate, second.settings.accumulate) == ("fp16", "fp32")


def test_a_tree_of_more_rows_than_the_kernels_take_is_refused():
    """The core would run its pass, with other bits than plain decoding."""
    target, _ = packed_target("gqa", n_layer=1)
    head = random_head(target)
    engine = Engine(target, 256, backend=KernelBackend(target))
    engine.use(EagleDrafter(head, TreeShape(2, 8, 63)))
    more = EagleDrafter(head, TreeShape(2, 8, 64))
    with pytest.raises(FasteagleError, match="use at most 63, because passes of more"):
        engine.use(more)
    left = KernelBackend(target)
    left.leave("passes")
    for backend in (None, left):  # by the core no row has the bits that it has alone
        Engine(target, 256, backend=backend).use(more)


def by_the_core(x, scale, eps):
    norm = RMSNorm(x.shape[1], eps)
    norm.weight.data = scale
    return norm(x)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(qk_norm_whole=True), "norms of whole queries and keys"),
        (dict(moe=MoEConfig(4, 2, 64), qk_norm_whole=True), "norms of whole queries and keys"),
        (dict(moe=MoEConfig(4, 2, 96)), "inputs that are no multiple of 64"),
        (dict(moe=MoEConfig(4, 2, 64, shared_ffn_dim=96)), "inputs that are no multiple of 64"),
        (dict(moe=MoEConfig(4, 2, 64), dim=192), "experts at a model dim that is no multiple of"),
        (dict(n_head=32, n_kv_head=32, head_dim=18), "attention heads of 18 columns"),
        (dict(n_head=8, n_kv_head=8, head_dim=8), "attention heads of 8 columns"),
        (dict(n_head=2, head_dim=320), "attention heads of 320 columns"),
    ],
)
def test_what_blocks_are_left_to_the_core_for(changes, reason):
    """Experts are replayed only if they are not: the core reads on the host which are chosen."""
    model = random_target(tiny_config(**SHAPE | changes))
    pack_(model.blocks, Scheme(4, 32))
    backend = KernelBackend(model.half())
    experts = "experts" if "moe" in changes else "blocks"
    assert backend.leaves_blocks and backend.target.ops.run_blocks is None
    assert f"{experts} by the core ({reason}" in backend.describe()


def test_experts_are_replayed_while_the_kernels_run_them():
    backend = KernelBackend(packed_target("experts")[0])
    backend._may_replay = True  # as on a device
    assert not backend.leaves_blocks and ", replayed" in backend.describe()
    backend.leave("passes")
    assert "replayed" not in backend.describe()


@pytest.mark.parametrize("name", ["gqa", "experts"])
def test_what_several_answers_share(name):
    """A pass, where no row's bits depend on the others: the LM head must be quantized too."""
    model, _ = packed_target(name, vocab_size=64)
    for quantized in (False, True):
        if quantized:
            pack_lm_head_(model)
        backend = KernelBackend(model)
        backend._may_replay = True  # as on a device
        assert backend.shares_passes is quantized
        turns = "replayed; several answers take turns"
        assert backend.describe().endswith(", replayed" if quantized else turns)
    backend._pass = mock.Mock(return_value=["outputs"], runs=mock.Mock(is_captured=True))
    for backend._may_replay in (False, True):
        assert backend.verify_together([], [], "capture") == ["outputs"] and backend.shares_passes
        backend._pass.assert_called_with([], [], "capture" if backend._may_replay else None)
    backend._pass.runs.is_captured = False
    assert backend.verify_together([], []) == ["outputs"], "this one ran without a graph"
    assert not backend.shares_passes and backend.describe().endswith(turns)
    alone = EAGER._replace(verify=lambda state, target, proposal: (state, proposal))
    with mock.patch.object(KernelBackend, "pieces", alone):  # with the bits of a row alone
        assert backend.verify_together([1, 2], [3, 4]) == [(1, 3), (2, 4)]
    backend = KernelBackend(model)
    backend.leave("passes")
    assert not backend.shares_passes


class Other(InterleavedLinear):
    """A linear of a kind of its own, whose results the kernels would not compute."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: setattr(block.mlp.down, "bias", torch.zeros(128)), "biases"),
        (lambda block: setattr(block.attention.out, "bias", torch.zeros(128)), "biases"),
        (lambda block: setattr(block.attention, "k_norm", nn.Identity()), "queries or keys alone"),
        (lambda block: setattr(block.mlp.down, "__class__", Other), "not quantized, or in anoth"),
        (lambda block: setattr(block.mlp, "down", nn.Linear(192, 128).half()), "not quantized, or"),
    ],
)
def test_other_linears_keep_their_blocks(change, reason):
    """Those of one block do, and all blocks stay with the core."""
    model, _ = packed_target("qwen3")
    change(model.blocks[1])
    backend = KernelBackend(model)
    assert backend.leaves_blocks and backend.target.ops.run_blocks is None
    assert "blocks by the core" in backend.describe() and reason in backend.describe()


def test_norms_of_blocks_that_are_not_fused(monkeypatch):
    """Norms of heads too; their results are those of the model's own."""
    norms = []

    def normed(x, scale, eps):
        norms.append(tuple(x.shape))
        return by_the_core(x, scale, eps)

    monkeypatch.setattr(fixed_norm, "rms_norm", normed)
    monkeypatch.setattr(cuda_backend, "obstacle", lambda block: "odd sizes")
    model, dense = packed_target("qwen3")
    expected, _ = passed(Target(model, tree_attention.OPS), 5)
    assert KernelBackend(dense).target.ops.norm is CORE.norm
    result, _ = passed(KernelBackend(model).target, 5)
    assert torch.equal(result, expected)
    block = [(5, 128), (20, 32), (10, 32), (5, 128)]
    assert norms == [*block, *block, (5, 128)]


def test_a_norm_reads_rows_of_a_wider_tensor(monkeypatch):
    """Kernels expect one row after the other."""
    norm, x, normed = RMSNorm(128, 1e-5), torch.randn(5, 256), mock.Mock(side_effect=by_the_core)
    monkeypatch.setattr(fixed_norm, "rms_norm", normed)
    assert torch.equal(fixed_norm.apply_norm(norm, x[:, :128]), norm(x[:, :128].contiguous()))
    assert normed.call_args.args[0].is_contiguous()


@pytest.mark.parametrize("left", [False, True])
def test_blocks_by_the_core_over_keys_in_8_bits(left):
    """Where blocks do not fit the kernels, and after the kernels have failed."""
    model, dense = packed_target("gqa")
    backend = KernelBackend(model if left else dense, "int8")
    if left:
        backend.leave("passes")
    expected, keys = passed(core_target(dense, "int8"), 5)
    for target in (backend.target, backend.core):
        result, own = passed(target, 5)
        assert torch.allclose(result.float(), expected, atol=1e-2)
        assert own.rows.dtype == torch.int8
        values = [dense_rows(cache.rows, torch.float32) for cache in (own, keys)]
        assert torch.allclose(*values, atol=0.05)


@pytest.mark.parametrize("E", [16, 256])
def test_the_narrowest_and_the_widest_heads_fit(E):
    model = random_target(tiny_config(**SHAPE | dict(head_dim=E)))
    pack_(model.blocks, Scheme(4, 32))
    assert not KernelBackend(model.half()).leaves_blocks


@pytest.mark.parametrize("rows", [2, MAX_ROWS, MAX_ROWS + 1])
def test_a_step_of_a_head_sees_a_tree_without_a_mask(rows, monkeypatch):
    """As far as the kernels take its rows."""
    model, _ = packed_target(vocab_size=64)
    head = random_head(model)
    pack_(head.half(), Scheme(4, 64))
    views = []

    def run_alone(self, x, rows, *rest):
        views.append(rows.visible)
        return x

    monkeypatch.setattr(cuda_blocks.FusedBlocks, "run_alone", run_alone)
    step, cache = KernelBackend(model).step(head), KVCache(head.config.block, 256, HALF, "cpu")
    ids, depths = torch.arange(rows) % 60, torch.zeros(rows, dtype=torch.long)
    view = TreeView(torch.tensor(9), torch.zeros(rows, 1, dtype=torch.int32), depths, None)
    step(ids, torch.zeros(rows, 128, dtype=HALF), 9 + depths, 9 + torch.arange(rows), view, cache)
    assert [isinstance(seen, TreeView) for seen in views] == [rows <= MAX_ROWS]


def test_what_is_too_large_for_one_program_or_in_documents_is_torchs():
    check_order(1030, 70, "cpu")
    parents = torch.tensor([-1] * 32 + [i for i in range(32) for _ in range(32)])
    pool = Pool(torch.arange(1056), -torch.rand(1056), parents)
    merged = pool, 32, 2, torch.tensor([5, 2000]), torch.tensor([-0.1, -0.2])
    assert all(map(torch.equal, cuda_ops.fuse(*merged), fuse(*merged)))
    text, last = torch.tensor([1, 2, 0, 0, 0]), torch.tensor(1)
    one, two = (Lookup(corpus=Corpus([[1, 2, 3, 4]], "cpu")) for _ in range(2))
    result, expected = cuda_ops.look_up(one, text, last, 2), two.propose(text, last, 2)
    assert result[0].tolist() == [3, 4] and all(map(torch.equal, result, expected))


@pytest.mark.parametrize(("n_candidates", "n_nodes"), [(5, 8), (8, 5)])
def test_the_size_of_a_tree_is_declared_as_it_is(n_candidates, n_nodes):
    ids = torch.arange(n_candidates)
    pool, root = Pool(ids, -torch.rand(n_candidates), torch.full_like(ids, -1)), ids[:1]
    there = Pool(*(each.to("meta") for each in pool[:3]))
    expected = rerank(pool, root, n_nodes)
    declared = cuda_ops.rerank(there, root.to("meta"), n_nodes)
    for name in ("tokens", "parents", "valid"):
        own, other = getattr(expected, name), getattr(declared, name)
        assert own.shape == other.shape and own.dtype == other.dtype
    *_, sources = cuda_ops.rerank_pool(*there[:3], None, root.to("meta"), n_nodes)
    assert sources.shape == (0,), "what the kernel returns for no sources"


def test_the_largest_that_one_program_takes_is_its():
    n, rows = cuda_ops.MOST_CANDIDATES, torch.arange(cuda_ops.MOST_TREE_ROWS)
    pool = Pool(torch.arange(n), -torch.rand(n), torch.full((n,), -1))
    calls = {
        "rerank_pool": lambda: cuda_ops.rerank(pool, rows[:1], 8),
        "fuse_pool": lambda: cuda_ops.fuse(pool, n, 1, rows[:2], torch.zeros(2)),
        "relate_rows": lambda: cuda_ops.relate(rows, rows >= 0),
    }
    for name, call in calls.items():
        with mock.patch.object(cuda_ops, name, return_value=(rows,) * (3 + ("pool" in name))) as op:
            call()
        assert op.called, name


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_on_the_device(name, accumulate, kv):
    check_blocks(name, accumulate, kv, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("lm_head", ["own kernels", "dense"])
@pytest.mark.parametrize("algorithm", ["eagle1", "mtp", "eagle3", "eagle3.1", "eagle3 pre"])
def test_a_step_of_a_draft_head_on_the_device(algorithm, lm_head):
    check_step_of_head("gqa", algorithm, lm_head, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("P", "N"), [(1, 1), (68, 15), (300, 63), (510, 59), (1000, 20)])
def test_the_order_of_a_tree_on_the_device(P, N):
    """Threads of a program hand each other rows through memory."""
    check_order(P, N, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("V", [64, 32001, 128256])
def test_drawn_tokens_on_the_device(V):
    check_draw(V, "cuda")


@pytest.mark.gpu
def test_lookups_on_the_device():
    for N, n_tokens in ((5000, 3), (600, 400), (2113, 100_000), (131_137, 20)):
        check_lookup(N, n_tokens, "cuda")
    for shape in ((3, 3, 8), (10, 6, 8), (1, 0, 6), (2, 5, 63)):
        check_fuse(*shape, "cuda")


@pytest.mark.gpu
def test_small_kernels_on_the_device():
    logits = torch.randn(4, 128256, device="cuda")
    ids, logp = cuda_ops.top_children(logits, 10)
    wanted, wanted_logp = top_children(logits, 10)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(logp, wanted_logp, rtol=1e-5, atol=1e-5)
    rows = torch.randn(64, 8, 100, 128, device="cuda").bfloat16()
    expected, path = rows.clone(), torch.tensor([0, 2, 5, 6, 0], device="cuda")
    expected[:, :, 50:54] = rows[:, :, 50 + path[:4]]
    cuda_ops.move_cache_rows(rows, torch.tensor(50, device="cuda"), path)
    assert torch.equal(rows, expected)
    x, scale = 3 * torch.randn(33, 4096, device="cuda"), torch.rand(4096, device="cuda").half()
    normed = fixed_norm.rms_norm(x, scale, 1e-5)
    assert torch.equal(fixed_norm.rms_norm(x[:1], scale, 1e-5), normed[:1])
    wanted = x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt() * scale
    torch.testing.assert_close(normed.float(), wanted, rtol=2e-3, atol=2e-3)
