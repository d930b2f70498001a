"""What the kernels compile to for a consumer Ampere card (sm_86), read without having one.

A pass over 4-bit weights leaves a multiprocessor about 11 instructions of a lane for each weight it
streams at 90 % of 936 GB/s. A kernel that leaves the fast path shows here.
"""

from __future__ import annotations

import re

import pytest
import torch

import sass
from fasteagle.quant import kernels, tiling
from fasteagle.quant.interleaved import BLOCK_N, InterleavedWeight
from sass import TWO_PROGRAMS, opcodes

K = 4096
POINTERS = {
    "x_ptr": "*fp16",
    "words_ptr": "*i16",
    "params_ptr": "*i32",
    "out_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "out_scales_ptr": "*fp32",
}
# (format, rows, accumulate, variant)
FORMS = [
    ("g128", 16, "fp32", ""),
    ("g128", 32, "fp16", ""),
    ("g32", 32, "fp32", ""),
    ("g32-offsets", 32, "fp16", ""),
    ("int8", 16, "fp32", ""),
    ("int8", 32, "fp32", ""),
    ("int8-g32", 32, "fp32", ""),
    ("g128", 16, "fp16", "gated"),
    ("g128", 32, "fp16", "scaled"),
    ("g32-offsets", 16, "fp16", "scaled"),
]


def empty_weight(name: str) -> InterleavedWeight:
    """A weight of a format without its tensors."""
    bits = 8 if name.startswith("int8") else 4
    group = re.search(r"g(\d+)", name)
    none = torch.empty(0)
    return InterleavedWeight(
        none, none, K, K, bits, int(group[1]) if group else K, offsets="offsets" in name
    )


def compile_kernel(
    function,
    pointers: dict[str, str],
    constants: dict[str, object],
    sm: int = 86,
    options: dict[str, object] = kernels.OPTIONS,
):
    aligned = ("out_columns", "Np", "Kp")
    target = sass.GPUTarget("cuda", sm, 32)
    return sass.compile_kernel(function, pointers, constants, options, aligned, target)


def warps(weight, cut) -> int:
    return kernels.options(weight.bits, cut.block_m)["num_warps"]


def compile_product(name: str, rows: int, accumulate: str, variant: str, sm: int = 86):
    """The kernel that a product of `rows` rows launches."""
    weight = empty_weight(name)
    cut = tiling.cut_rows(weight.layout, rows, rows, 4)
    chosen = {variant: True} if variant else {}
    constants = kernels.constants(weight, cut, accumulate, **chosen)
    pointers = POINTERS | ({"out_ptr": "*fp16"} if variant == "gated" else {})
    options = kernels.options(weight.bits, cut.block_m)
    compiled = compile_kernel(kernels.interleaved_kernel, pointers, constants, sm, options)
    return compiled, weight, cut


@pytest.mark.parametrize(("name", "rows", "accumulate", "variant"), FORMS)
def test_main_loop(name, rows, accumulate, variant, tmp_path):
    compiled, weight, cut = compile_product(name, rows, accumulate, variant)
    code, usage = sass.disassemble(compiled, tmp_path)
    assert usage.shared <= TWO_PROGRAMS and cut.resident * (usage.shared + 1024) <= 100 * 1024
    assert cut.resident * usage.registers * 32 * warps(weight, cut) <= 65536, (
        "programs that fit beside each other"
    )
    assert usage.stack == usage.local == 0, "registers spill"
    loop = sass.main_loop(code)
    counts = opcodes(loop)
    macs = max(rows, 16) * weight.layout.tile * BLOCK_N
    m16n8k16 = 16 * 8 * 16
    assert counts["HMMA"] * warps(weight, cut) * m16n8k16 == macs, "once each, all of it"
    kind = "HMMA.16816.F16" if accumulate == "fp16" else "HMMA.16816.F32"
    assert all(kind in code for code in loop if "HMMA" in code)
    assert counts["LDGSTS"] and not counts["LDG"], "a load in the loop waits for memory"
    assert not counts["STS"], "values go from shared memory to the tensor cores and not back"
    assert not counts["I2F"] and not counts["I2FP"], "lop3 does without conversions"


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize(("name", "rows", "accumulate", "variant"), FORMS[:2])
def test_other_cards(name, rows, accumulate, variant, capability, tmp_path):
    """The same instruction on every card: one order of sums, for any number of rows."""
    compiled, *_ = compile_product(name, rows, accumulate, variant, capability)
    _, usage = sass.disassemble(compiled, tmp_path)
    # For Hopper ptxas stops at 128 registers, and 32 rows with fp32 sums lack four more.
    assert usage.local == 0 and usage.stack <= (16 if capability == 90 else 0), "registers spill"
    assert usage.shared <= TWO_PROGRAMS and usage.registers <= 255
    kinds = set(re.findall(r"\b\w*mma[.\w]*", compiled.asm["ptx"]))
    sums = "f16.f16.f16.f16" if accumulate == "fp16" else "f32.f16.f16.f32"
    assert kinds == {f"mma.sync.aligned.m16n8k16.row.col.{sums}"}


@pytest.mark.parametrize("name", ["g128", "g32-offsets", "int8-g32"])
def test_dequantizing_compiles_with_the_assembly(name):
    constants = kernels.format_constants(empty_weight(name)) | {"UNIT": 1.0}
    pointers = {"words_ptr": "*i16", "params_ptr": "*i32", "out_ptr": "*fp16"}
    assert "lop3" in compile_kernel(kernels.dequantize_kernel, pointers, constants).asm["ptx"]


def test_partial_sums_are_added_in_order():
    pointers = {"parts_ptr": "*fp32", "y_ptr": "*fp32"}
    ptx = compile_kernel(kernels.sum_kernel, pointers, {"SPLIT": 3, "BLOCK_N": BLOCK_N}).asm["ptx"]
    assert len(re.findall(r"\badd(?:\.rn)?\.f32", ptx)) == 3
    assert not re.search(r"\b(atom|red)\.", ptx)
