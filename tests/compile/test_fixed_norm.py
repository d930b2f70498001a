"""What scales of norms allow: sums in fp16 stay finite, or are in fp32."""

from __future__ import annotations

import shutil
from unittest import mock

import pytest
import torch

from fasteagle.compile import cuda_backend, fixed_norm
from fasteagle.compile.cuda_backend import ALL_ROWS, FEW_ROWS
from fasteagle.compile.fixed_norm import keep_sums_finite
from fasteagle.loading import open as opening
from fasteagle.loading import source
from fasteagle.loading.heads.write import save_head
from fasteagle.model import RMSNorm, causal_mask
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.quant import cuda_linear
from fasteagle.quant.cuda_linear import InterleavedLinear
from helpers import change_tensors, drafting_of, random_head
from interleaved_models import KernelBackend, fused_target, packed_target

LARGEST = 511.5  # at D = 128: sqrt(128 * 128) * 511.5 is 65,472


def accumulates(module):
    return {m.accumulate for m in module.modules() if isinstance(m, InterleavedLinear)}


@pytest.mark.parametrize("norm", ["attention_norm", "mlp_norm"])
@pytest.mark.parametrize(
    ("scale", "sums"), [(LARGEST, "fp16"), (LARGEST + 1, "fp32"), (-LARGEST - 1, "fp32")]
)
def test_sums_that_might_be_infinite_are_in_fp32(norm, scale, sums, capsys):
    """One scale of one block: fused blocks have one way to add up."""
    target, _ = packed_target(accumulate="fp16")
    getattr(target.blocks[1], norm).weight.data[7] = scale
    fused = fused_target(target).ops.run_blocks.__self__
    assert accumulates(target) == {sums} and fused.shared.settings.accumulate == sums
    few = KernelBackend(target).few_rows
    assert few == FEW_ROWS[sums], "cuBLAS adds in fp32"
    assert capsys.readouterr().err.count("\n") == (sums == "fp32")


def test_experts_take_a_prompt_as_passes_of_64_rows():
    """They have 64 rows at a time in any pass, and a small one is replayed."""
    target, _ = packed_target("experts")
    assert KernelBackend(target).few_rows == ALL_ROWS


def test_no_wider_sums_than_needed(capsys):
    """Norms of heads feed no product, and other linears than ours add up as they do."""
    target, dense = packed_target("qwen3", accumulate="fp16")
    for model in (target, dense):
        model.blocks[0].attention.q_norm.weight.data.fill_(6e4)
        keep_sums_finite(model.blocks, "model")
    assert accumulates(target) == {"fp16"}
    dense.blocks[0].mlp_norm.weight.data.fill_(6e4)
    keep_sums_finite(dense.blocks, "model")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("scale", "checked"), [(1.0, 2), (600.0, 2), (5800.0, 3)])
def test_blocks_that_do_not_fit_check_no_input_behind_a_norm(scale, checked, monkeypatch):
    """Such as 5,800 sqrt(128), beyond fp16; inputs of the output and of down are checked."""
    monkeypatch.setattr(cuda_backend, "obstacle", lambda block: "odd sizes")
    target, _ = packed_target()
    for block in target.blocks:
        block.mlp_norm.weight.data.fill_(scale)
    own = KernelBackend(target).target
    ids, rows = torch.arange(70) % 40, torch.arange(70)
    check = mock.patch.object(cuda_linear, "in_half_range", side_effect=cuda_linear.in_half_range)
    with check as checks, mock.patch.object(fixed_norm, "rms_norm", normed):
        own.encode(ids, rows, rows, causal_mask(0, 70, 256, None, "cpu"), own.new_cache(256))
    assert checks.call_count == checked * len(target.blocks)


def normed(x, scale, eps):
    """The kernel's result, on a CPU."""
    norm = RMSNorm(len(scale), eps)
    norm.weight = torch.nn.Parameter(scale)
    return norm(x)


@pytest.fixture
def sums_in_fp16(monkeypatch):
    """Weights are packed as for a card whose sums in fp16 are faster."""

    def make_linear(weight, bias, device, dtype, native=False):
        return InterleavedLinear(weight, bias, "fp16")

    monkeypatch.setattr(source, "make_linear", make_linear)
    monkeypatch.setattr(
        opening, "choose_backend", lambda model, kv, advice: KernelBackend(model, kv)
    )


@pytest.mark.parametrize(("model", "draft_head"), [("fp16", "fp32"), ("fp32", "fp16")])
def test_scales_are_looked_at_while_loading(
    tiny_dir, tmp_path, monkeypatch, capsys, sums_in_fp16, model, draft_head
):
    """Those of the model, and those of a draft head."""
    scales = {"fp16": 1.0, "fp32": 3000.0}
    monkeypatch.setattr(opening, "prove", lambda *args: None)  # kernels are for CUDA
    folder = shutil.copytree(tiny_dir, tmp_path / "model")
    name = "model.layers.0.post_attention_layernorm.weight"
    change_tensors(folder, lambda tensors: tensors[name].fill_(scales[model]))
    options = RuntimeOptions(device="cpu", quant="int4-g32", dtype="fp16", max_seq_len=64)
    runtime = opening.open_model(str(folder)).loaded(options)
    engine = runtime.engine
    assert accumulates(engine.model.blocks) == {model}
    assert ("sums of the model might be" in capsys.readouterr().err) == (model == "fp32")
    head = random_head(engine.model, rope_scaling=None, rope_base=10000.0)
    head.block.mlp_norm.weight.data.fill_(scales[draft_head])
    save_head(tmp_path / "head", head, {}, torch.float32)
    draft = DraftOptions("eagle", str(tmp_path / "head"))
    drafter = drafting_of(draft, engine.model.config).drafter(
        "x", engine, runtime.checkpoint, lambda line: None
    )
    engine.use(drafter)
    assert accumulates(drafter.head) == {draft_head}
    assert ("sums of the draft head might be" in capsys.readouterr().err) == (draft_head == "fp32")
