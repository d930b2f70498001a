"""Decoder blocks on CUDA: launches, machine code and, in Triton's interpreter, results.

What `interpreted_blocks.py` tests needs an interpreter chosen before Triton is imported, so it runs
in a process of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from device_checks import check_cache_in_8_bits, check_order, check_step_of_head
from fasteagle.drafting.draft_head import top_children
from fasteagle.loading.registry import preset
from fasteagle.model import CORE, RMSNorm, Target
from helpers import pass_in_interpreter
from interleaved_models import CONFIGS, SEQ_LEN, KernelBackend, fused_target, packed_target, passed

pytest.importorskip("triton", reason="Triton is not installed (it comes with torch on Linux)")

import sass
from fasteagle.compile import cuda_backend, cuda_ops, fixed_norm, tree_attention
from fasteagle.compile.kernels import block_kernels, draft_kernels, order_kernels, tree_kernels
from launch_counter import block_launches, head_launches


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    pass_in_interpreter(Path(__file__).with_name("interpreted_blocks.py"))


@pytest.mark.parametrize("int8", [False, True], ids=["auto", "int8"])
@pytest.mark.parametrize("T", [1, 16, 64])
def test_launches_of_a_block_at_7b(T, int8):
    """Eight, and one behind the last block; eighteen and more by modules and Inductor."""
    found = block_launches(preset("llama2-7b"), T, int8=int8)
    assert found == {
        "norm_kernel": 3,  # the last adds up what the block's last product has left
        "interleaved_kernel": 4,
        "prefix_kernel": 1,
        "finish_kernel": 1,
    }
    assert sum(block_launches(preset("llama2-7b"), T, n_blocks=3).values()) == 3 * 8 + 1


@pytest.mark.parametrize("change", [{}, {"qk_norm": True}, {"ffn_dim": 2048}], ids=str)
def test_what_a_row_is_summed_by_does_not_depend_on_their_number(change):
    """Warps and constants of every launch, but for rows of a block and buffers for loads."""
    config, found = dataclasses.replace(preset("llama2-7b"), **change), {}
    for T in (1, 2, 16, 17, 64):
        listed = []
        block_launches(config, T, settings=listed)
        found[T] = [
            (name, {key: value for key, value in made.items() if key not in ("BLOCK_M", "STAGES")})
            for name, made in listed
        ]
        assert all(made["num_warps"] and not made["enable_fp_fusion"] for _, made in found[T])
    assert all(listed == found[1] for listed in found.values())


def test_launches_of_a_draft_step_at_7b():
    """One more than a block alone: fc, whose partial sums the first norm adds up."""
    found = head_launches(preset("llama2-7b"), 4)
    assert found == block_launches(preset("llama2-7b"), 4) + Counter(["interleaved_kernel"])


def test_a_narrow_model_has_one_launch_more():
    """Its gate and up are split along K to fill the card, so their product is a kernel apart."""
    found = block_launches(dataclasses.replace(preset("llama2-7b"), ffn_dim=2048), 16)
    assert found["gate_kernel"] == 1 and found.total() == 10


def test_norms_of_heads_and_wide_heads_keep_rope_apart():
    for change in ({"qk_norm": True}, {"head_dim": 256, "n_head": 16, "n_kv_head": 16}):
        found = block_launches(dataclasses.replace(preset("llama2-7b"), **change), 16)
        assert found["rope_kernel"] == 1 and found.total() == 10


def test_passes_under_a_mask_are_the_cores(monkeypatch):
    model, _ = packed_target()
    tokens, rows = torch.arange(5), torch.arange(5)
    mask = torch.ones(5, 256).tril().bool()
    monkeypatch.setattr(fixed_norm, "rms_norm", by_the_core)
    results = []
    before = Target(model, tree_attention.OPS)
    for make in (lambda: before, lambda: fused_target(model)):
        target = dataclasses.replace(make(), cache_dtype=torch.float16)
        results.append(target.encode(tokens, rows, rows, mask, target.new_cache(256))[0])
    assert torch.equal(*results)


def by_the_core(x, scale, eps):
    norm = RMSNorm(x.shape[1], eps)
    norm.weight.data = scale
    return norm(x)


def test_other_linears_keep_their_blocks():
    model, _ = packed_target()
    model.blocks[1].mlp.down.bias = torch.nn.Parameter(torch.zeros(128))
    backend = KernelBackend(model)
    assert backend.leaves_blocks and backend.target.ops.run_blocks is None
    assert "blocks by the core" in backend.describe()


def test_norms_of_blocks_that_are_not_fused(monkeypatch):
    """Norms of heads too; their results are those of the model's own."""
    norms = []

    def normed(x, scale, eps):
        norms.append(tuple(x.shape))
        return by_the_core(x, scale, eps)

    monkeypatch.setattr(fixed_norm, "rms_norm", normed)
    monkeypatch.setattr(cuda_backend, "fits", lambda block: False)
    model, dense = packed_target("qwen3")
    expected, _ = passed(Target(model, tree_attention.OPS), 5)
    assert KernelBackend(dense).target.ops.norm is CORE.norm
    found, _ = passed(KernelBackend(model).target, 5)
    assert torch.equal(found, expected)
    block = [(5, 128), (20, 32), (10, 32), (5, 128)]
    assert norms == [*block, *block, (5, 128)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Compile anew: not from, and not into, the cache of the person who runs this."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


F32 = "*fp32"
NORM_ARGUMENTS = dict(
    x_ptr=F32, parts_ptr=F32, scale_ptr="*bf16", total_ptr=F32, out_ptr="*fp16", eps="fp32"
)
RERANK_ARGUMENTS = (
    dict(tokens_ptr="*i64", scores_ptr=F32, parents_ptr="*i64", root_ptr="*i64", rows_ptr="*i32")
    | dict(out_tokens_ptr="*i64", out_parents_ptr="*i64", out_valid_ptr="*i1")
    | dict(out_places_ptr="*i64")
)
RELATIONS_ARGUMENTS = dict(
    parents_ptr="*i64", valid_ptr="*i1", mask_ptr="*i1", depths_ptr="*i64", paths_ptr="*i32"
)
KERNELS = {
    "norm of fc's sum": (
        block_kernels.norm_kernel,
        NORM_ARGUMENTS | dict(x_ptr="*bf16"),
        dict(SPLIT=4, NORMED=False, STORED=True, LIMIT=511.75, BLOCK=4096),
        block_kernels.norm_options(4096),
    ),
    "norm of the last sum": (
        block_kernels.norm_kernel,
        NORM_ARGUMENTS,
        dict(SPLIT=4, NORMED=False, STORED=False, LIMIT=0.0, BLOCK=4096),
        block_kernels.norm_options(4096),
    ),
    "norm": (
        block_kernels.norm_kernel,
        NORM_ARGUMENTS,
        dict(SPLIT=7, NORMED=True, STORED=True, LIMIT=0.0, BLOCK=4096),
        block_kernels.norm_options(4096),
    ),
    "wide norm": (
        block_kernels.norm_kernel,
        NORM_ARGUMENTS,
        dict(SPLIT=3, NORMED=True, STORED=True, LIMIT=0.0, BLOCK=8192),
        block_kernels.norm_options(8192),
    ),
    "rope to int8": (
        block_kernels.rope_kernel,
        dict(parts_ptr=F32, bias_ptr=F32, q_norm_ptr="*bf16", k_norm_ptr="*bf16", cos_ptr=F32)
        | dict(sin_ptr=F32, slots_ptr="*i64", q_ptr="*bf16", k_ptr="*i8", v_ptr="*i8")
        | dict(eps="fp32"),
        dict(SPLIT=3, E=128, HALF=64, BIASED=False, NORMED=True, INT8=True),
        block_kernels.ONE_WARP,
    ),
    "rope": (
        block_kernels.rope_kernel,
        dict(parts_ptr=F32, bias_ptr=F32, q_norm_ptr="*bf16", k_norm_ptr="*bf16", cos_ptr=F32)
        | dict(sin_ptr=F32, slots_ptr="*i64", q_ptr="*bf16", k_ptr="*bf16", v_ptr="*bf16")
        | dict(eps="fp32"),
        dict(SPLIT=3, E=128, HALF=64, BIASED=False, NORMED=True, INT8=False),
        block_kernels.ONE_WARP,
    ),
    "gate": (
        block_kernels.gate_kernel,
        dict(parts_ptr=F32, out_ptr="*fp16", scales_ptr=F32),
        dict(SPLIT=3, SPAN=64, SPANS=8, EXPONENT=8),
        dict(num_warps=4, enable_fp_fusion=False),
    ),
    "attention by rows": (
        tree_kernels.finish_kernel,
        dict(q_ptr="*bf16", k_ptr="*bf16", v_ptr="*bf16", seq_len_ptr="*i64", depths_ptr="*i64")
        | dict(parts_ptr=F32, stats_ptr=F32, paths_ptr="*i32", out_ptr="*fp16", scale="fp32"),
        tree_kernels.finish_constants(128, None, True),
        tree_kernels.FINISH_OPTIONS,
    ),
    "commit": (
        block_kernels.commit_kernel,
        dict(rows_ptr="*bf16", start_ptr="*i64", path_ptr="*i64"),
        dict(E=128, E_PAD=128),
        block_kernels.ONE_WARP,
    ),
    "commit of int8": (
        block_kernels.commit_kernel,
        dict(rows_ptr="*i8", start_ptr="*i64", path_ptr="*i64"),
        dict(E=144, E_PAD=256),
        block_kernels.ONE_WARP,
    ),
    "chunk": (
        draft_kernels.chunk_kernel,
        dict(logits_ptr=F32, parts_ptr=F32, ids_ptr="*i32", sums_ptr=F32),
        dict(K=10, CHUNK=draft_kernels.CHUNK),
        draft_kernels.OPTIONS,
    ),
    "merge": (
        draft_kernels.merge_kernel,
        dict(parts_ptr=F32, ids_ptr="*i32", sums_ptr=F32, best_ptr="*i64", logp_ptr=F32),
        dict(K=10, C_PAD=64, N_PAD=1024),
        draft_kernels.OPTIONS,
    ),
    "rerank": (
        order_kernels.rerank_kernel,
        RERANK_ARGUMENTS,
        dict(P_PAD=1024, CHUNK=8),
        order_kernels.OPTIONS,
    ),
    "rerank of the default": (
        order_kernels.rerank_kernel,
        RERANK_ARGUMENTS,
        dict(P_PAD=128, CHUNK=64),
        order_kernels.OPTIONS,
    ),
    "relations": (
        order_kernels.relations_kernel,
        RELATIONS_ARGUMENTS,
        dict(T_PAD=64, ROUNDS=6),
        order_kernels.OPTIONS,
    ),
    "relations of few rows": (
        order_kernels.relations_kernel,
        RELATIONS_ARGUMENTS,
        dict(T_PAD=16, ROUNDS=4),
        order_kernels.OPTIONS,
    ),
}


@pytest.mark.parametrize("capability", [86, 89, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code(name, capability, tmp_path):
    function, types, constants, options = KERNELS[name]
    target = sass.GPUTarget("cuda", capability, 32)
    strides = [arg for arg in function.arg_names if re.match("stride_[kv]", arg)]
    compiled = sass.compile_kernel(function, types, constants, options, strides, target)
    _, usage = sass.disassemble(compiled, tmp_path)
    assert usage.stack == usage.local == 0, "registers spill"
    alone = name.startswith(("norm", "rerank", "relations"))  # few programs, or one
    assert usage.registers <= (200 if alone else 170)
    assert usage.shared <= 32 * 1024
    assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"]), "sums have a fixed order"


def test_threads_wait_for_the_rows_that_others_write():
    """What the interpreter cannot see: a barrier between the store of rows and their load."""
    function, types, constants, options = KERNELS["rerank of the default"]
    ptx = sass.compile_kernel(function, types, constants, options).asm["ptx"]
    stores = [m.start() for m in re.finditer(r"st\.global\.\S*b32", ptx)]
    loads = [m.start() for m in re.finditer(r"ld\.global\.\S*b32", ptx) if m.start() > stores[0]]
    assert stores and loads and "bar.sync" in ptx[stores[0] : loads[0]]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_on_the_device(name, accumulate):
    """The results of the dense model in fp32, and the same bits for any number of rows."""
    target, dense = packed_target(name, accumulate=accumulate)
    expected, _ = passed(Target(dense), 9, torch.float32)
    target.cuda().init_rope(512, "cuda")
    target = fused_target(target)
    whole, cache = passed(target, 9)
    error = (whole.cpu() - expected).norm() / expected.norm()
    assert error < 5e-3
    for T in (1, 2, 5):
        part, _ = passed(target, T)
        assert torch.equal(part, whole[:T]), T
    assert not cache.rows[:, :, SEQ_LEN + 9 :].any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_in_8_bits_on_the_device(name, accumulate):
    check_cache_in_8_bits(name, accumulate, "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lm_head", ["own kernels", "dense"])
@pytest.mark.parametrize("algorithm", ["eagle1", "eagle3", "eagle3.1", "eagle3 pre"])
def test_a_step_of_a_draft_head_on_the_device(algorithm, lm_head):
    check_step_of_head("gqa", algorithm, lm_head, "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("P", "N"), [(1, 1), (68, 15), (300, 63), (510, 59), (1000, 20)])
def test_the_order_of_a_tree_on_the_device(P, N):
    """Threads of a program hand each other rows through memory."""
    check_order(P, N, "cuda")


@pytest.mark.gpu
@needs_gpu
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
