"""Faults that are planted into compiled kernels are found, and by their name."""

from __future__ import annotations

import re

import pytest
import torch

from fasteagle.compile.kernels import order_kernels
from fasteagle.quant import interleaved, kernels
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme
from ptx.instructions import Refused
from ptx.memory import Fault

BARRIER = r"bar\.sync\s+0;"


def replaced(pattern: str, by: str, count: int = 0):
    def edit(ptx: str) -> str:
        edited, n = re.subn(pattern, by, ptx, count=count)
        assert n, "nothing was replaced"
        return edited

    return edit


def without_handover(ptx: str) -> str:
    """Remove the barriers between the first store of 32 bits and the next load of so many."""
    store = re.search(r"st\.global\S*b32", ptx).end()
    load = store + re.search(r"ld\.global\S*b32", ptx[store:]).start()
    between, n = re.subn(BARRIER, "", ptx[store:load])
    assert n, "no barrier there"
    return ptx[:store] + between + ptx[load:]


def product() -> torch.Tensor:
    """Nine tiles with group scales, in a pipeline of asynchronous copies."""
    weight = torch.randn(129, 1152, generator=torch.Generator().manual_seed(1))
    packed = interleaved.pack(quantize_weight(weight, Scheme(4, 128)))
    return kernels.linear(weight[:7].half(), packed)


def rerank() -> torch.Tensor:
    scores = torch.arange(40) * 7 % 40 + 0.0
    order = torch.arange(40)
    return order_kernels.rerank(order, scores, order - 1, None, torch.tensor([7]), 12)[1]


FAULTS = {
    "no barrier before reading": (
        product, replaced(rf"(wait_group\s+6;\s*){BARRIER}", r"\1"), "another warp wrote since"
    ),
    "no barrier before copying": (
        product, replaced(rf"(?s)(mma\.sync.*?){BARRIER}", r"\1", 1), "another warp read since"
    ),
    "a wait for too few copies": (
        product, replaced(r"wait_group(\s+)6", r"wait_group\g<1>12"), "copy to it is under way"
    ),
    "no wait": (product, replaced(r"cp\.async\.wait_group\s+6;", ""), "uninitialised|under way"),
    "no mask of a store": (
        product, replaced(r"@%p\d+ st\.global", "st.global"), "out of bounds.*st.global"
    ),
    "an index one too far": (
        product, replaced(r"(cp\.async\.ca[^;]*) \+ 0 \], 0x4", r"\1 + 4 ], 0x4"),
        "out of bounds.*cp.async"
    ),
    "an index too far by half a word": (
        product, replaced(r"(cp\.async\.cg[^;]*) \+ 0 \], 0x10", r"\1 + 2 ], 0x10"), "not aligned"
    ),
    "programs that do the same": (
        product, replaced(r"mov\.u32(\s+%r\d+), %ctaid\.y", r"mov.u32\1, 0"), "another program"
    ),
    "a buffer that is too small": (
        product, replaced(r"(ldmatrix[^;]*\[%r\d+)\]", r"\1+65536]"), "shared memory out of bounds"
    ),
    "no barrier between threads that hand each other rows": (
        rerank, without_handover, "reads global memory that another warp wrote since"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(card, name):
    run, edit, message = FAULTS[name]
    card.edit = edit
    with pytest.raises(Fault, match=message):
        run()


def test_a_wrong_mask_changes_the_result(card):
    expected = product()
    rerank()  # without a fault neither of them is refused
    card.edit = lambda ptx: ptx.replace("0x00f000f0", "0x00f00070")
    assert not torch.equal(product(), expected)


def test_bytes_that_no_kernel_wrote(card):
    parts = torch.empty(2, 3, 128)
    parts[0] = 1.0  # torch's own writes are not followed: all counts as written
    launch(parts)
    parts = torch.empty(2, 3, 128)
    with pytest.raises(Fault, match="sum_kernel reads uninitialised global memory: .*ld.global"):
        launch(parts)


def launch(parts: torch.Tensor) -> torch.Tensor:
    y = torch.empty(3, 128)
    kernels.sum_kernel[(1, 3)](parts, y, 128, 128, 384, SPLIT=2, BLOCK_N=128, **kernels.OPTIONS)
    return y


@pytest.mark.parametrize("card", [90], indirect=True)
def test_unknown_instructions_are_refused_by_name(card):
    """Hopper's own product, which only this kernel uses: on numbers that are exact in any order."""
    with pytest.raises(Refused, match="wgmma"):
        order_kernels.relations(torch.zeros(64, dtype=torch.int64), torch.ones(64) > 0)


HAND = {"num_warps": 2, "enable_fp_fusion": False}
# Instructions by hand, for what Triton compiles into none of our kernels

HEAD = """.visible .entry hand(.param .u64 .ptr hand_param_0) .reqntid 64 {
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;
ld.param.b64 %rd1, [hand_param_0];
mov.u32 %r1, %tid.x;
setp.lt.u32 %p1, %r1, 32;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
"""
BY_HAND = {
    "a barrier in a branch": (
        "@%p1 bra $L_0; ret; $L_0: bar.sync 0; ret;", None
    ),
    "a barrier that some never reach": (
        "@%p1 bra $L_0; bar.sync 0; ret; $L_0: bar.sync 0; ret;", "waits at a barrier"
    ),
    "different values in one place": (
        "st.global.b32 [%rd1], %r1; ret;", "writes different values into one place"
    ),
    "shared memory that nothing wrote to": (
        "ld.shared.b32 %r2, [global_smem]; ret;", "reads uninitialised shared memory"
    ),
    "half a warp": (
        "setp.lt.u32 %p2, %r1, 16; @%p2 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, "
        "[global_smem]; ret;", "half a warp moves a matrix"
    ),
    "a write after another warp's read": (
        "ld.global.b32 %r2, [%rd3]; xor.b32 %r3, %r1, 32; mul.wide.u32 %rd4, %r3, 4; "
        "add.s64 %rd5, %rd1, %rd4; st.global.b32 [%rd5], %r2; ret;", "another warp read since"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_instructions_by_hand(card, name):
    code, message = BY_HAND[name]
    card.edit = lambda ptx: HEAD + code + "}"
    memory = torch.zeros(64, dtype=torch.int32)
    if message is None:
        launch_by_hand(memory)
        return
    with pytest.raises(Fault, match=message):
        launch_by_hand(memory)


@pytest.mark.parametrize(
    "code", ["add.sat.s32 %r2, %r1, %r1", "atom.global.add.u32 %r2, [%rd1], 1"]
)
def test_unknown_forms_are_refused(card, code):
    card.edit = lambda ptx: HEAD + code + "; ret; }"
    with pytest.raises(Refused, match=re.escape(code)):
        launch_by_hand(torch.zeros(64, dtype=torch.int32))


@pytest.mark.parametrize(
    ("code", "bits"),
    [("max", 0x3F800000), ("max.NaN", 0x7FC00000), ("min", 0x3F800000), ("min.NaN", 0x7FC00000)],
)
def test_larger_and_smaller_numbers_beside_nan(card, code, bits):
    compared = f"{code}.f32 %r2, 0f7FC00000, 0f3F800000; st.global.b32 [%rd3], %r2; ret; }}"
    card.edit = lambda ptx: HEAD + compared
    launch_by_hand(memory := torch.zeros(64, dtype=torch.int32))
    assert (memory == bits).all()


def launch_by_hand(memory: torch.Tensor) -> None:
    """Run a program in place of a kernel with one pointer first."""
    order_kernels.relations_kernel[(1,)](
        memory, memory, memory, memory, memory, 2, T_PAD=16, ROUNDS=1, **HAND
    )
