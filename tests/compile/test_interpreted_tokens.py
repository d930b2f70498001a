"""Kernels that draw, look up and merge, as compiled, in our interpreter of PTX."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it comes with torch on Linux)")

from device_checks import check_draw, check_fuse, check_lookup
from helpers import rest_slow


def test_lookups_are_those_of_torch(kernels_on_cpu):
    check_lookup("cpu")
    assert kernels_on_cpu.launches["look_up_kernel"] == 20


SHAPES = [(3, 3, 8), (10, 6, 8), (1, 4, 2), (4, 1, 5), (1, 0, 6), (2, 5, 63)]


@pytest.mark.parametrize(("k", "n_levels", "R"), rest_slow(SHAPES, 2))
def test_merged_candidates_are_those_of_torch(kernels_on_cpu, k, n_levels, R):
    check_fuse(k, n_levels, R, "cpu")
    assert kernels_on_cpu.launches["fuse_kernel"] == R + 1


@pytest.mark.parametrize("V", rest_slow([5000, 64, 32001], 1))
def test_drawn_tokens_are_those_of_torch(kernels_on_cpu, V):
    check_draw(V, "cpu")
    assert kernels_on_cpu.launches["draw_kernel"] == 8
