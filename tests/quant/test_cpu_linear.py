"""Weights of our CPU kernels in memory."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch

from fasteagle.quant import cpu_build, cpu_linear
from fasteagle.quant.cpu_linear import ALIGNMENT, NativeLinear, in_huge_pages
from fasteagle.quant.packed import int8


def linears():
    generator = torch.Generator().manual_seed(1)
    sizes = [(48, 64), (17, 32), (100, 96)]
    made = []
    for size in sizes:
        values = torch.randint(-128, 128, size, generator=generator)
        made.append(NativeLinear(int8(values, torch.ones(size[0], 1)), None))
    return made


@pytest.mark.parametrize("refused", [False, True])
def test_weights_moved_into_huge_pages_are_the_same(refused, monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, *how):
            assert how == (mmap.MADV_HUGEPAGE,)
            if refused:
                raise OSError(errno.EINVAL, "no huge pages")
            super().madvise(*how)

    monkeypatch.setattr(cpu_linear.mmap, "mmap", Memory)
    before, after = linears(), linears()
    in_huge_pages(after)
    ends = []
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.packed, new.packed)
        assert new.packed.data_ptr() % ALIGNMENT == 0 and new.packed.is_contiguous()
        ends += [new.packed.data_ptr(), new.packed.data_ptr() + new.packed.numel()]
    assert ends == sorted(ends)  # one after the other, none in another
    assert ends[-1] - ends[0] < sum(old.packed.numel() + ALIGNMENT for old in before)
    cpu_build.load()
    x = torch.randn(3, 32)
    assert torch.equal(before[1](x), after[1](x))


def test_no_weights_and_no_huge_pages(monkeypatch):
    in_huge_pages([])
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    after = linears()
    places = [linear.packed.data_ptr() for linear in after]
    in_huge_pages(after)
    assert places == [linear.packed.data_ptr() for linear in after]
