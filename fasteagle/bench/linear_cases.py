"""Linears to be timed alone, by format: copies of a random weight, and how each is multiplied.

Our kernels are called as decoder blocks call them: `partial_sums`, one launch, whose splits along K
the next kernel adds up. That is also the work that `quant.tiling` predicts.

Shapes: M rows of x, N outputs, K inputs, Kp inputs in whole tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.compile.precompile import collecting, compile_all, workers_here
from fasteagle.errors import FasteagleError
from fasteagle.quant import interleaved, packed
from fasteagle.quant.interleaved import BLOCK_N, InterleavedWeight

TORCHAO, DENSE = "torchao-g128", "fp16"
OURS = ("int4-g128", "int4-g64", "int4-g32", "int4-g128-offsets", "int4-g32-offsets", "int8")
# Largest error of a result, relative to the lengths of its row and its column.
MOST_ERROR = {"fp32": 5e-4, "fp16": 2e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """Several copies of one weight [N, K] in memory, together larger than the cache."""

    calls: Sequence[Callable[[Tensor], Tensor]]  # a product each, of x [M, columns]
    n_bytes: int  # of one copy
    dtype: torch.dtype  # of x
    N: int
    K: int
    columns: int  # K, or Kp
    accumulate: str = "fp32"
    reference: Tensor | None = None  # fp64 [n, K]: the first outputs' weights, to check results

    def rows(self, M: int, device: torch.device | str) -> Tensor:
        """Return random x [M, columns], zero past K."""
        x = torch.randn(M, self.K, device=device).to(self.dtype)
        return F.pad(x, (0, self.columns - self.K))

    def compile_for(self, inputs: Sequence[Tensor]) -> None:
        """Compile the kernels of ours that these x need, several at a time."""
        if self.reference is None:
            return
        with collecting() as missing:
            for x in inputs:
                self.calls[0](x)
        compile_all(list(missing.values()), inputs[0].device, workers_here())

    def check(self, x: Tensor) -> Tensor:
        """Return the first call's result; raise `FasteagleError` where it is wrong."""
        y = self.calls[0](x)
        if self.reference is None:
            return y
        n = len(self.reference)
        computed = (y.sum(0) if y.dim() == 3 else y)[:, :n].double()
        x = x[:, : self.K].double()
        size = x.norm(dim=1)[:, None] * self.reference.norm(dim=1)
        error = float(((computed - x @ self.reference.T) / size).abs().max())
        most = MOST_ERROR[self.accumulate]
        if not error < most:  # NaN is none
            raise FasteagleError(
                f"{len(x)} rows by [{self.N:,}, {self.K:,}] are wrong: error {error:.1e}, "
                f"limit {most:g}"
            )
        return y


def make_case(kernel: str, N: int, K: int, accumulate: str) -> Case | None:
    """Return a case on the default device; None where the kernel's library is missing."""
    if kernel == TORCHAO:
        return _torchao(N, K)
    if kernel == DENSE:
        half = torch.float16
        dense = _copies(lambda: torch.randn(N, K, dtype=half), 2 * N * K)
        calls = [partial(F.linear, weight=w) for w in dense]
        return Case(calls, 2 * N * K, half, N, K, columns=K)
    first = interleaved.pack(random_weight(kernel, N, K))

    def copy() -> InterleavedWeight:
        return dataclasses.replace(first, words=first.words.clone(), params=first.params.clone())

    multiply = block_product if first.words.device.type == "cuda" else reference_product
    weights = _copies(copy, first.n_bytes)
    return Case(
        [partial(multiply, weight=w, accumulate=accumulate) for w in weights],
        first.n_bytes,
        torch.float16,
        N,
        K,
        columns=first.layout.padded(K),
        accumulate=accumulate,
        reference=interleaved.dequantize(_first_outputs(first)).double(),
    )


def block_product(x: Tensor, weight: InterleavedWeight, accumulate: str) -> Tensor:
    """Multiply fp16 x [M, Kp] like a decoder block: fp32 [S, M, N or Np], to be summed over S.

    More rows than the kernels take are multiplied as a prompt's are: fp32 [M, N].
    """
    from fasteagle.quant import kernels  # Triton exists where CUDA does

    if x.shape[0] > kernels.MAX_ROWS:
        return kernels.linear(x[:, : weight.K], weight, accumulate=accumulate)
    return kernels.partial_sums(x, weight, accumulate)


def reference_product(x: Tensor, weight: InterleavedWeight, accumulate: str) -> Tensor:
    """Return the product in plain torch, [M, N]."""
    return interleaved.linear(x[:, : weight.K], weight, accumulate=accumulate)


def random_weight(kernel: str, N: int, K: int) -> packed.PackedWeight:
    """Return a weight in the format of one of `OURS`."""
    if kernel == "int8":
        values = torch.randint(-127, 128, (N, K), dtype=torch.int8)
        return packed.int8(values, torch.full((N, 1), 1e-3))
    group, *with_offsets = kernel.removeprefix("int4-g").split("-")
    size = N, K // int(group)
    values = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    scales = torch.full(size, 1e-2, dtype=torch.float16)
    if with_offsets:
        return packed.int4(values, scales, offsets=torch.full(size, -0.08, dtype=torch.float16))
    zeros = torch.randint(0, 16, size, dtype=torch.uint8)
    return packed.int4(values, scales, zeros=zeros)


def _first_outputs(weight: InterleavedWeight) -> InterleavedWeight:
    """Return the part of a weight that its first program reads."""
    first, params = (t[:, :BLOCK_N].contiguous() for t in (weight.words, weight.params))
    return dataclasses.replace(weight, words=first, params=params, N=min(weight.N, BLOCK_N))


def _torchao(N: int, K: int) -> Case | None:
    """Return a case of tinygemm, the int4 kernel that torchao has for consumer cards."""
    try:
        # Optional here, and takes seconds.
        from torchao.quantization import Int4WeightOnlyConfig, quantize_
    except ImportError:
        return None

    def one() -> torch.nn.Module:
        module = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
        config = Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")
        quantize_(module, config)
        return module.requires_grad_(False)

    n_bytes = N * K // 2 + 4 * N * K // 128  # as it is stored, without what pads K to 1,024
    return Case(_copies(one, n_bytes), n_bytes, torch.bfloat16, N, K, columns=K)


def _copies(make: Callable[[], Any], n_bytes: int) -> list[Any]:
    on_cpu = torch.get_default_device().type == "cpu"
    cache = 0 if on_cpu else torch.cuda.get_device_properties(0).L2_cache_size
    return [make() for _ in range(max(2, -(-3 * cache // n_bytes)))]
