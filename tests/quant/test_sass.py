"""What the kernels compile to for a consumer Ampere card (sm_86), read without having one.

A pass over 4-bit weights leaves a multiprocessor about 11 instructions of a lane for each weight it
streams at 90 % of 936 GB/s. A kernel that leaves the fast path shows here.
"""

from __future__ import annotations

import re
from functools import partial

import pytest

import sass
from fasteagle.quant import kernels, tiling
from fasteagle.quant.interleaved import BLOCK_N, InterleavedWeight
from helpers import rest_slow
from sass import TWO_PROGRAMS, floats, halves, opcodes

K = 4096
# (format, rows, accumulate, variant): first one of each format, type of sums and variant
FORMS = [
    ("g128", 16, "fp32", ""),
    ("g128", 32, "fp16", ""),
    ("int8-g32", 32, "fp32", ""),
    ("g128", 16, "fp16", "gated"),
    ("g32-offsets", 16, "fp16", "scaled"),
    ("g32", 32, "fp32", ""),
    ("g32-offsets", 32, "fp16", ""),
    ("int8", 16, "fp32", ""),
    ("int8", 32, "fp32", ""),
    ("g128", 32, "fp16", "scaled"),
]


def empty_weight(name: str) -> InterleavedWeight:
    """A weight of a format without its values."""
    bits = 8 if name.startswith("int8") else 4
    group = re.search(r"g(\d+)", name)
    return sass.empty_weight(K, K, bits, int(group[1]) if group else K, "offsets" in name)


def compile_product(name: str, rows: int, accumulate: str, variant: str, sm: int = 86):
    """The kernel that a product of `rows` rows launches."""
    weight = empty_weight(name)
    cut = tiling.cut_rows(weight.layout, rows, rows, 4)
    x, out, scales = halves(rows, K), floats(4, rows, K), floats(K // kernels.SPAN, rows)
    out = out.half() if variant == "gated" else out
    column_scales = scales if variant == "scaled" else None
    gated = variant == "gated"
    launch = partial(kernels._launch, x, weight, accumulate, cut, out, scales, column_scales, gated)
    (compiled,) = sass.compiled(launch, sm)
    return compiled, weight, cut.resident, compiled.metadata.num_warps


@pytest.mark.parametrize(("name", "rows", "accumulate", "variant"), rest_slow(FORMS, 5))
def test_main_loop(name, rows, accumulate, variant, tmp_path):
    compiled, weight, resident, warps = compile_product(name, rows, accumulate, variant)
    code, usage = sass.disassemble(compiled, tmp_path)
    assert usage.shared <= TWO_PROGRAMS and resident * (usage.shared + 1024) <= 100 * 1024
    assert resident * usage.registers * 32 * warps <= 65536, "programs that fit beside each other"
    assert usage.stack == usage.local == 0, "registers spill"
    loop = sass.main_loop(code)
    counts = opcodes(loop)
    macs = max(rows, 16) * weight.layout.tile * BLOCK_N
    m16n8k16 = 16 * 8 * 16
    assert counts["HMMA"] * warps * m16n8k16 == macs, "once each, all of it"
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
    rows = halves(kernels.MAX_ROWS + 1, K)
    (compiled,) = sass.compiled(lambda: kernels.linear(rows, empty_weight(name)))
    assert "lop3" in compiled.asm["ptx"]


def test_partial_sums_are_added_in_order():
    weight = sass.empty_weight(512, K, 4, 128, False)
    _, compiled = sass.compiled(lambda: kernels.linear(halves(1, K), weight))
    split = tiling.tiling(weight.layout, 512, K, 1, kernels.card_of(weight.words.device)).split
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"\badd(?:\.rn)?\.f32", ptx)) == split > 1
    assert not sass.ATOMIC.search(ptx)
