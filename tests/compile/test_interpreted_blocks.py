"""Fused blocks, drafting and commits by the kernels as compiled, in our interpreter of PTX."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from device_checks import check_blocks, check_step_of_head, close
from fasteagle.compile import cuda_backend, cuda_blocks, proof
from fasteagle.compile.int8_cache import dense_rows
from fasteagle.compile.kernels import block_kernels, gate_kernels
from fasteagle.generate import Engine
from fasteagle.loading import source
from fasteagle.loading.open import open_model
from fasteagle.model import KVCache, MoE, PromptView, Target, causal_mask
from fasteagle.options import RuntimeOptions, SamplingParams
from fasteagle.quant import kernels as quant_kernels
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import FusedShape
from helpers import eagle3_of, fused_drafter, random_head, rest_slow, save_tiny
from interleaved_models import (
    CONFIGS,
    SEQ_LEN,
    KernelBackend,
    fused_target,
    pack_lm_head_,
    packed_head,
    packed_target,
    passed,
    view_of,
)

pytestmark = pytest.mark.usefixtures("kernels_on_cpu")


CASES = [(name, Scheme(4, 64), "fp32") for name in CONFIGS]
CASES += [("gqa", Scheme(4, 64), "fp16"), ("gqa", Scheme(8), "fp32")]


@pytest.mark.parametrize(("name", "scheme", "accumulate"), rest_slow(CASES))
def test_results_of_the_model(name, scheme, accumulate, request):
    if name != "gqa":
        request.getfixturevalue("products_by_torch")
    target, dense = packed_target(name, scheme, accumulate)
    expected, dense_cache = passed(Target(dense), 9, torch.float32)
    result, cache = passed(fused_target(target), 9)
    limit = 4e-3 if accumulate == "fp16" else 2e-3
    first = dense.embedding(torch.arange(9) * 5)
    close(result - first, expected - first, limit)
    here = slice(SEQ_LEN, SEQ_LEN + 9)
    close(cache.rows[:, :, here], dense_cache.rows[:, :, here], limit)
    assert torch.equal(cache.rows[:, :, :SEQ_LEN], dense_cache.rows[:, :, :SEQ_LEN].half())
    assert not cache.rows[:, :, SEQ_LEN + 9 :].any()


@pytest.mark.parametrize(
    ("name", "kv"),
    rest_slow([("qwen3", "auto"), ("qwen2", "int8"), ("mha", "auto"), ("wide heads", "int8")]),
)
def test_a_prompt(name, kv, kernels_on_cpu):
    """Seventy rows: norms and RoPE by kernels; a window needs a mask, the beginning none."""
    model, dense = packed_target(name)
    tokens, rows = torch.arange(70) % 50, torch.arange(70)
    results = []
    for target, visible in (
        (Target(dense), causal_mask(0, 70, 256, None, "cpu")),
        (fused_target(model, kv), causal_mask(0, 70, 256, None, "cpu")),
        (fused_target(model, kv), PromptView(70, rows)),
    ):
        cache = target.new_cache(256)
        x, _ = target.encode(tokens, rows, rows, visible, cache)
        keys = dense_rows(cache.rows, torch.float32)
        assert not keys[:, :, 70:].any()
        results.append((x, keys[:, :, :70]))
    limit = 2e-2 if kv == "int8" else 4e-3
    for x, keys in results[1:]:
        close(x, results[0][0], limit)
        close(keys, results[0][1], limit)
    layers = len(model.blocks)
    assert kernels_on_cpu.launches["rope_kernel"] == 2 * layers
    assert kernels_on_cpu.launches["gate_row_kernel"] == 2 * layers
    assert kernels_on_cpu.launches["norm_kernel"] == 2 * (2 * layers + 2)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, "gate_rows", "_large", "prompt_attention"])
def test_the_proof_sees_kernels_of_long_prompts(wrong, monkeypatch):
    """More rows than decoding has: their products, gate and attention are others."""
    model, _ = packed_target("gqa")
    backend = KernelBackend(model)
    places = {"gate_rows": gate_kernels, "_large": quant_kernels, "prompt_attention": cuda_blocks}
    if wrong is not None:
        right = getattr(places[wrong], wrong)

        def shifted(*args):
            result = right(*args)
            if wrong == "gate_rows":
                return result[0].roll(1, -1), result[1]
            return result.roll(1, -1)

        monkeypatch.setattr(places[wrong], wrong, shifted)
    result, expected = (
        proof._products(model.blocks) if wrong == "_large" else proof._prompts(backend)
    )
    off = (result - expected).norm() / expected.norm()
    limit = proof.TOLERANCE if wrong == "_large" else proof.PROMPT_TOLERANCE
    assert (off > limit) == (wrong is not None), off


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int4-g32", "int8"])
def test_the_proof_bears_the_roundings_of_bf16(quant, products_by_torch, tmp_path, monkeypatch):
    """On an H200 it refused the kernels for this tiny model, where they are nearer to fp32."""
    monkeypatch.setattr(
        source, "make_linear", lambda weight, bias, *_: InterleavedLinear(weight, bias)
    )
    folder = save_tiny(tmp_path, "llama3", hidden_size=256, intermediate_size=128)
    features = []
    for dtype in ("bf16", "fp32"):
        options = RuntimeOptions("cpu", quant=quant, dtype=dtype, cpu_kernels="aten")
        backend = KernelBackend(open_model(str(folder)).prepared(options).engine().model)
        if dtype == "bf16":
            assert [c.failure() for c in proof.checks(backend) if c.part == "passes"] == [None] * 2
            features += proof._prompts(backend)
        else:
            core = backend.core
            features.append(proof._encode(core, proof.LONG_PREFIX, proof._state(core)))
    own, core, exact = features
    assert (own - exact).norm() < (core - exact).norm()


@pytest.mark.parametrize("is_row", [False, True])
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_norms_of_rows_that_do_not_fill_a_program(is_row, limit):
    """Partial sums are added to rows of their own, or to one for all: the bias of `fc`."""
    M, D = 3, 200
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(D if is_row else (M, D), generator=generator)
    x = x.bfloat16() if is_row else x
    parts, scale = torch.randn(2, M, D + 8, generator=generator), torch.rand(D, generator=generator)
    total, out = block_kernels.add_norm(x, parts, scale, 0.5, torch.float32, limit)
    torch.testing.assert_close(total, x + parts[0, :, :D] + parts[1, :, :D])
    expected = torch.nn.functional.rms_norm(total, (D,), scale, 0.5)
    expected = expected.clamp(-limit, limit) if limit else expected
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("F", rest_slow([64, 1536 - 64], 1))
def test_gate_of_a_prompt(F):
    """Rows that fp16 holds have a scale of 1, larger ones a power of two; NaN and inf stay."""
    generator = torch.Generator().manual_seed(1)
    sums = torch.randn(5, 2 * F, generator=generator)
    sums[1] *= 500.0
    sums[1, -2:] = torch.tensor([1.0, 1e20])
    sums[2, :2] = torch.tensor([1.0, -3e30])
    sums[3, 1] = float("nan")
    sums[4, :2] = float("inf")
    values, scales = gate_kernels.gate_rows(sums, "fp32")
    gate, up = sums[:, 0::2], sums[:, 1::2]
    expected = torch.nn.functional.silu(gate) * up
    assert values.dtype == torch.float16 and scales.shape == (5, 1)
    assert values[4, 0] == float("inf")
    for row in range(4):  # fp16 values of a row differ from its largest by 2^40 at most
        atol = 1e-12 * float(expected[row].nan_to_num().abs().max())
        close = {"rtol": 1e-3, "atol": max(atol, 1e-7), "equal_nan": True}
        torch.testing.assert_close(values[row] * scales[row], expected[row], **close)
    assert scales[0] == 1 and scales[3] == 1
    largest = expected[:3].abs().amax(1) / scales[:3, 0]
    assert (largest < 2**15).all() and (largest[1:] >= 2**14).all()
    narrow, narrower = gate_kernels.gate_rows(sums[:2], "fp16")
    assert (narrow.abs() < 2**9).all() and narrower[1] > scales[1]


def test_gate_of_a_product_that_is_split():
    """Spans of a row do not fill its last program, and each has a scale of its own."""
    F, span = 9 * gate_kernels.SPAN, gate_kernels.SPAN
    parts = torch.randn(3, 5, 2 * F, generator=torch.Generator().manual_seed(1))
    parts[:, 2, : 2 * span] *= 1000.0
    values, scales = gate_kernels.gate(parts, "fp32")
    sums = parts.sum(0)
    expected = torch.nn.functional.silu(sums[:, 0::2]) * sums[:, 1::2]
    assert values.dtype == torch.float16 and scales.shape == (9, 5)
    assert scales[0, 2] > 1 and (scales != 1).sum() == 1
    close(values * scales.T.repeat_interleave(span, 1), expected, 1e-3)


@pytest.mark.parametrize("name", rest_slow(["experts", "shared expert"], 0))
def test_experts_of_a_prompt(name, kernels_on_cpu):
    """Seventy rows under a mask: experts run in two chunks, gate and up and down of each."""
    model, dense = packed_target(name)
    tokens, rows = torch.arange(70) % 50, torch.arange(70)
    mask = torch.ones(70, 256).tril().bool()
    results = []
    for target, T in ((Target(dense), 70), (fused_target(model), 70), (fused_target(model), 66)):
        cache = dataclasses.replace(target, cache_dtype=target.weight.dtype).new_cache(256)
        x, _ = target.encode(tokens[:T], rows[:T], rows[:T], mask[:T], cache)
        results.append(x)
    expected, whole, part = results
    close(whole, expected, 4e-3)
    close(part, whole[:66], 1e-3)
    layers = sum(isinstance(block.mlp, MoE) for block in model.blocks)
    per_layer = 2 * 2 * (1 + (model.config.moe.shared_ffn_dim > 0))
    assert kernels_on_cpu.launches["expert_kernel"] == 2 * layers * per_layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "accumulate", "kv"),
    [("qwen3", "fp32", "auto"), ("mha", "fp16", "auto")]
    + [(name, "fp32", "int8") for name in ("gqa", "qwen3")],
)
def test_rows_do_not_depend_on_their_number(name, accumulate, kv, request):
    if kv == "int8":
        request.getfixturevalue("products_by_torch")
    check_blocks(name, accumulate, kv, "cpu")


@pytest.mark.slow
def test_blocks_that_do_not_fit_are_the_same_for_any_number_of_rows(monkeypatch):
    """Products block by block, as of sizes that do not fit, between norms in a fixed order."""
    model, dense = packed_target("qwen3")
    expected, _ = passed(Target(dense), 9, torch.float32)
    monkeypatch.setattr(cuda_backend, "obstacle", lambda block: "odd sizes")
    backend = KernelBackend(model)
    assert backend.leaves_blocks
    target = backend.target
    whole, _ = passed(target, 9)
    close(whole, expected, 4e-3)
    for T in (1, 2, 5):
        assert torch.equal(passed(target, T)[0], whole[:T])


@pytest.mark.slow
@pytest.mark.parametrize("split", [2, 3])
def test_split_products_and_a_separate_gate(monkeypatch, split):
    """Where K is split, sums are added up by the next kernel: of every product of a block."""
    cut, gates = quant_kernels.tiling, []
    monkeypatch.setattr(
        quant_kernels, "tiling", lambda *args: dataclasses.replace(cut(*args), split=split)
    )
    gate = gate_kernels.gate
    monkeypatch.setattr(
        gate_kernels, "gate", lambda parts, *rest: gates.append(len(parts)) or gate(parts, *rest)
    )
    model, dense = packed_target("mha", dim=512, ffn_dim=1024 - 64)
    expected, _ = passed(Target(dense), 3, torch.float32)
    target = fused_target(model)
    result, _ = passed(target, 3)
    close(result, expected, 2e-3)
    assert gates == [split] * len(model.blocks)
    for T in (1, 2):
        assert torch.equal(passed(target, T)[0], result[:T])


@pytest.mark.slow
def test_an_activation_beyond_fp16():
    """Its span of columns is scaled: neither inf, nor are other columns lost."""
    target, dense = packed_target("mha")
    for model in (target, dense):
        model.blocks[1].mlp_norm.weight.data *= 4000
    expected, _ = passed(Target(dense), 9, torch.float32)
    mlp, norm = dense.blocks[1].mlp, dense.blocks[1].mlp_norm
    gate, up = mlp.gate_up(norm(expected)).chunk(2, -1)
    assert (torch.nn.functional.silu(gate) * up).abs().max() > 65504
    close(passed(fused_target(target), 9)[0], expected, 2e-3)


STEPS = [
    ("mha", "eagle1", "own kernels"),
    ("gqa", "eagle1", "dense"),
    ("qwen2", "eagle1", "own kernels"),
    ("qwen2", "mtp", "dense"),
    ("gqa", "eagle3", "own kernels"),
    ("mha", "eagle3", "dense"),
    ("mha", "eagle3.1", "own kernels"),
    ("gqa", "eagle3 pre", "own kernels"),
]


@pytest.mark.parametrize(("name", "algorithm", "lm_head"), rest_slow(STEPS))
def test_a_step_of_a_draft_head(name, algorithm, lm_head, request):
    if name != "mha":
        request.getfixturevalue("products_by_torch")
    check_step_of_head(name, algorithm, lm_head, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_a_draft_head_fed_with_huge_features_stays_finite(accumulate):
    """No norm bounds what EAGLE-1's block reads and says."""
    target, _ = packed_target("mha", vocab_size=64)
    pack_lm_head_(target)
    head = random_head(target)
    head.fc.weight.data.mul_(20)  # what the block reads is huge, too
    head, _ = packed_head(head)
    head.block.attention.qkv.accumulate = accumulate
    head.borrow(target, 256)
    view = view_of(2, None)
    features = (6e4 * torch.randn(2, 128, generator=torch.Generator().manual_seed(1))).half()
    cache = KVCache(head.config.block, 256, torch.float16, "cpu")
    rows = view.seq_len + torch.arange(2)
    step = KernelBackend(target).step(head)
    logits, _ = step(torch.arange(2), features, view.seq_len + view.depths, rows, view, cache)
    assert logits.isfinite().all()


@pytest.mark.parametrize("path", [[0, 2, 5, 6], [0, 1, 3, 0], [0, 0, 0, 0], [0, 1, 2, 3], [0]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_commit(path, dtype):
    rows = (100 * torch.randn(4, 3, 40, 24, generator=torch.Generator().manual_seed(1))).to(dtype)
    expected, seq_len, path = rows.clone(), torch.tensor(20), torch.tensor(path)
    count = int((path > 0).sum()) + 1
    expected[:, :, 20 : 20 + count] = rows[:, :, 20 + path[:count]]
    block_kernels.commit(rows, seq_len, path)
    assert torch.equal(rows[:, :, : 20 + count], expected[:, :, : 20 + count])
    assert torch.equal(rows[:, :, 20 + len(path) :], expected[:, :, 20 + len(path) :])


class Recording(TorchDispatchMode):
    """Keeps the first call of each operator of ours, and the weights that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {}
        self.weights = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fasteagle" and function not in self.calls:
            places = [t.data_ptr() for t in args if isinstance(t, Tensor)]
            living = [cuda_blocks._LIVING[at] for at in places if at in cuda_blocks._LIVING]
            self.weights[function] = living
            copies = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs or {}))
            self.calls[function] = copies
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.usefixtures("products_by_torch")
def test_what_operators_declare(monkeypatch):
    """What they write, what they return, and the same of fake tensors."""
    target, _ = packed_target("gqa", n_layer=1, vocab_size=64)
    head, _ = packed_head(random_head(target, eagle3=eagle3_of("eagle3", target.config)))
    drafter = fused_drafter(head, FusedShape(2, 3, 5, 4))
    engine = Engine(target, 128, drafter=drafter, backend=KernelBackend(target))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # else no operator is called
    with Recording() as recording:
        next(engine.generate([5, 6, 7, 8], SamplingParams(), 4))
        list(engine.generate([5, 6, 7, 8], SamplingParams(), 4))
    names = {function._schema.name.split("::")[1] for function in recording.calls}
    expected = {"fused_blocks", "rms_norm", "top_children", "rerank", "relations"}
    assert names >= expected | {"move_rows", "look_up", "fuse", "draw"}
    for function, (args, kwargs) in recording.calls.items():
        for weights in recording.weights[function]:  # `opcheck` copies the key, too
            anywhere = collections.defaultdict(lambda weights=weights: weights)
            monkeypatch.setattr(cuda_blocks, "_LIVING", anywhere)
        torch.library.opcheck(function, args, kwargs, test_utils=("test_schema", "test_faketensor"))
