"""What the kernels compile to for a consumer Ampere card (sm_86), counted without having one.

A pass over 4-bit weights leaves a multiprocessor about 11 instructions of a lane for each weight it
streams at 90 % of 936 GB/s. The limits stand well below, a little above what was counted when they
were written, so that a change that doubles the work or leaves the fast path shows up here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fasteagle.quant.interleaved import BLOCK_N, InterleavedWeight

pytest.importorskip("triton", reason="Triton is not installed (it comes with torch on Linux)")

import sass
from fasteagle.quant import kernels, tiling
from sass import TWO_PROGRAMS, VERSION, opcodes

K = 4096

# (format, rows, accumulate): lane instructions per weight in the main loop, by Triton version.
LIMITS = {
    "3.9": {
        ("g128", 16, "fp32"): 2.6,
        ("g128", 16, "fp16"): 2.6,
        ("g128", 32, "fp32"): 2.9,
        ("g128", 32, "fp16"): 3.2,
        ("g64", 16, "fp32"): 2.8,
        ("g64", 32, "fp32"): 3.4,
        ("g32", 16, "fp32"): 3.5,
        ("g32", 32, "fp32"): 4.4,
        ("g128-offsets", 16, "fp32"): 2.8,
        ("g128-offsets", 32, "fp32"): 3.0,
        ("g32-offsets", 16, "fp32"): 3.0,
        ("g32-offsets", 32, "fp32"): 3.2,
        ("g32-offsets", 32, "fp16"): 3.9,
        ("int8", 16, "fp32"): 2.3,
        ("int8", 32, "fp32"): 2.8,
        ("int8", 32, "fp16"): 3.2,
        ("int8-g32", 16, "fp32"): 3.5,
        ("int8-g32", 32, "fp32"): 4.6,
    }
}
POINTERS = {
    "x_ptr": "*fp16",
    "words_ptr": "*i16",
    "params_ptr": "*i32",
    "out_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "out_scales_ptr": "*fp32",
}


class Compiled(NamedTuple):
    """A kernel for sm_86."""

    loop: list[str]  # SASS of the main loop
    weights: int  # of one iteration of one program
    usage: sass.Usage

    @property
    def per_weight(self) -> float:
        return len(self.loop) * 32 * kernels.OPTIONS["num_warps"] / self.weights


def empty_weight(name: str) -> InterleavedWeight:
    """A weight of a format without its tensors."""
    bits = 8 if name.startswith("int8") else 4
    group = re.search(r"g(\d+)", name)
    none = torch.empty(0)
    return InterleavedWeight(
        none, none, K, K, bits, int(group[1]) if group else K, offsets="offsets" in name
    )


def cut_for(weight: InterleavedWeight, rows: int):
    return tiling.cut_rows(weight.layout, rows, rows, 4)


def build(
    name: str, rows: int, accumulate: str, folder: Path, *, use_asm: bool = True, **variant: bool
) -> Compiled:
    """The variant that a product of `rows` rows launches."""
    weight = empty_weight(name)
    cut = cut_for(weight, rows)
    constants = kernels.constants(weight, cut, accumulate, **variant) | {"USE_ASM": use_asm}
    pointers = POINTERS | ({"out_ptr": "*fp16"} if variant.get("gated") else {})
    compiled = compile_kernel(kernels.interleaved_kernel, pointers, constants)
    code, usage = sass.disassemble(compiled, folder)
    weights = weight.layout.tile * BLOCK_N
    resident = cut.resident
    assert resident * (usage.shared + 1024) <= 100 * 1024, "programs that fit beside each other"
    threads = 32 * kernels.OPTIONS["num_warps"]
    assert resident * usage.registers * threads <= 65536
    return Compiled(sass.main_loop(code), weights, usage)


def compile_kernel(
    function, pointers: dict[str, str], constants: dict[str, object], target=sass.SM_86
):
    aligned = ("out_columns", "Np", "Kp")
    return sass.compile_kernel(function, pointers, constants, kernels.OPTIONS, aligned, target)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Compile anew: not from, and not into, the cache of the person who runs this."""
    if kernels.INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


counted = pytest.mark.skipif(
    VERSION not in LIMITS,
    reason=f"limits were counted with Triton {', '.join(LIMITS)}, this is {VERSION}",
)


@pytest.mark.parametrize(("name", "rows", "accumulate"), LIMITS["3.9"])
def test_main_loop(name, rows, accumulate, tmp_path):
    built = build(name, rows, accumulate, tmp_path)
    counts = opcodes(built.loop)
    print(
        f"\n{name} M={rows} {accumulate}: {built.per_weight:.2f} instructions per weight, "
        f"{built.usage}"
    )
    if VERSION in LIMITS:
        assert built.per_weight <= LIMITS[VERSION][name, rows, accumulate]
    assert built.usage.shared <= TWO_PROGRAMS
    assert built.usage.registers * 32 * kernels.OPTIONS["num_warps"] * 2 <= 65536
    assert built.usage.stack == built.usage.local == 0, "registers spill"
    macs = max(rows, 16) * built.weights
    m16n8k16 = 16 * 8 * 16
    assert counts["HMMA"] * kernels.OPTIONS["num_warps"] * m16n8k16 == macs, "once each, all of it"
    kind = "HMMA.16816.F16" if accumulate == "fp16" else "HMMA.16816.F32"
    assert all(kind in code for code in built.loop if "HMMA" in code)
    assert counts["LDGSTS"] and not counts["LDG"], "a load in the loop waits for memory"
    assert not counts["STS"], "values go from shared memory to the tensor cores and not back"
    assert not counts["I2F"] and not counts["I2FP"], "lop3 does without conversions"


# As `LIMITS`: the product of gate and up with its epilogue, and the one whose rows have scales.
VARIANTS = {
    ("g128", 16, "fp32", "gated"): 2.6,
    ("g128", 16, "fp16", "gated"): 2.6,
    ("g32-offsets", 32, "fp16", "gated"): 3.9,
    ("g128", 16, "fp32", "scaled"): 3.0,
    ("g128", 16, "fp16", "scaled"): 3.4,
    ("g128", 32, "fp16", "scaled"): 4.6,
    ("g32-offsets", 16, "fp16", "scaled"): 3.8,
    ("int8", 16, "fp16", "scaled"): 3.0,
}


@pytest.mark.parametrize(("name", "rows", "accumulate", "variant"), VARIANTS)
def test_main_loop_of_variants(name, rows, accumulate, variant, tmp_path):
    built = build(name, rows, accumulate, tmp_path, **{variant: True})
    print(f"\n{name} M={rows} {accumulate} {variant}: {built.per_weight:.2f}, {built.usage}")
    if VERSION in LIMITS:
        assert built.per_weight <= VARIANTS[name, rows, accumulate, variant]
    assert built.usage.shared <= TWO_PROGRAMS
    assert built.usage.stack == built.usage.local == 0, "registers spill"
    counts = opcodes(built.loop)
    assert counts["LDGSTS"] and not counts["LDG"], "a load in the loop waits for memory"
    assert not counts["STS"] and not counts["I2F"] and not counts["I2FP"]


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize(
    ("name", "rows", "accumulate", "variant"),
    [
        ("g128", 16, "fp16", {}),
        ("g128", 32, "fp32", {}),
        ("g128", 32, "fp16", {"scaled": True}),
        ("g128", 16, "fp16", {"gated": True}),
        ("int8", 32, "fp32", {}),
    ],
)
def test_other_cards(name, rows, accumulate, variant, capability, tmp_path):
    """The same instruction on every card: one order of sums, for any number of rows."""
    weight = empty_weight(name)
    constants = kernels.constants(weight, cut_for(weight, rows), accumulate, **variant)
    pointers = POINTERS | ({"out_ptr": "*fp16"} if variant.get("gated") else {})
    target = sass.GPUTarget("cuda", capability, 32)
    compiled = compile_kernel(kernels.interleaved_kernel, pointers, constants, target=target)
    _, usage = sass.disassemble(compiled, tmp_path)
    # For Hopper ptxas stops at 128 registers, and 32 rows with fp32 sums lack four more.
    assert usage.local == 0 and usage.stack <= (16 if capability == 90 else 0), "registers spill"
    assert usage.shared <= TWO_PROGRAMS and usage.registers <= 255
    kinds = set(re.findall(r"\b\w*mma[.\w]*", compiled.asm["ptx"]))
    sums = "f16.f16.f16.f16" if accumulate == "fp16" else "f32.f16.f16.f32"
    assert kinds == {f"mma.sync.aligned.m16n8k16.row.col.{sums}"}


@counted
def test_the_count_sees_a_slow_kernel(tmp_path):
    """Without the assembly the loop is far above its limit: the limits can fail."""
    built = build("g128", 16, "fp32", tmp_path, use_asm=False)
    assert built.per_weight > 1.5 * LIMITS[VERSION]["g128", 16, "fp32"]


@pytest.mark.parametrize("name", ["g128", "g32-offsets", "int8", "int8-g32"])
def test_dequantizing_compiles_with_the_assembly(name):
    constants = kernels.format_constants(empty_weight(name)) | {"UNIT": 1.0, "USE_ASM": True}
    pointers = {"words_ptr": "*i16", "params_ptr": "*i32", "out_ptr": "*fp16"}
    assert "lop3" in compile_kernel(kernels.dequantize_kernel, pointers, constants).asm["ptx"]


def test_partial_sums_are_added_in_order():
    pointers = {"parts_ptr": "*fp32", "y_ptr": "*fp32"}
    ptx = compile_kernel(kernels.sum_kernel, pointers, {"SPLIT": 3, "BLOCK_N": BLOCK_N}).asm["ptx"]
    assert len(re.findall(r"\badd(?:\.rn)?\.f32", ptx)) == 3
    assert not re.search(r"\b(atom|red)\.", ptx)
