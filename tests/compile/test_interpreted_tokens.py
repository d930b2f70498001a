"""Kernels that draw, look up and merge, as compiled, in our interpreter of PTX."""

from __future__ import annotations

import pytest

from device_checks import check_draw, check_fuse, check_lookup
from fasteagle.compile import cuda_ops
from fasteagle.compile.precompile import collecting, run_trees
from fasteagle.drafting.base import DraftOps
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import FusedShape
from helpers import captured_engine, random_head, random_target, rest_slow, tiny_config


@pytest.mark.parametrize(("N", "n_tokens"), [(5000, 3), (600, 400), (2113, 100_000)])
def test_lookups_are_those_of_torch(kernels_on_cpu, N, n_tokens):
    check_lookup(N, n_tokens, "cpu")
    assert kernels_on_cpu.launches["look_up_kernel"] == 19


SHAPES = [(3, 3, 8), (10, 6, 8), (1, 4, 2), (4, 1, 5), (1, 0, 6), (2, 5, 63)]


@pytest.mark.parametrize(("k", "n_levels", "R"), rest_slow(SHAPES, 2))
def test_merged_candidates_are_those_of_torch(kernels_on_cpu, k, n_levels, R):
    check_fuse(k, n_levels, R, "cpu")
    assert kernels_on_cpu.launches["fuse_kernel"] == R + 1 + (n_levels > 0)


@pytest.mark.parametrize("V", rest_slow([5000, 64, 32001], 1))
def test_drawn_tokens_are_those_of_torch(kernels_on_cpu, V):
    check_draw(V, "cpu")
    assert kernels_on_cpu.launches["draw_kernel"] == 8


def test_kernels_that_run_read_nothing_that_others_should_have_written(kernels_on_cpu):
    """Of two trees one may have a kernel that is compiled, behind another one that is not."""
    target = random_target(tiny_config())
    engine = captured_engine(target, 256)
    engine.use(FusedDrafter(random_head(target), FusedShape(4, 3, 8, 8), 256))
    ops = cuda_ops.top_children, cuda_ops.rerank, None, cuda_ops.look_up, cuda_ops.fuse
    engine.drafter.run_by(DraftOps(*ops))

    def run(shape):
        specs = [engine.spec(shape, SamplingMode())]
        run_trees(engine.drafter, specs, engine.state, cuda_ops.relate)

    run(FusedShape(4, 3, 8, 8))  # the card refuses to read what nobody has written
    with collecting() as variants:
        run(FusedShape(2, 7, 8, 8))
    assert {name for name, _ in variants} == {"fuse_kernel"}
