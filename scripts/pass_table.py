"""Where the time of a target pass goes on a CPU, by rows: one line a part of the pass.

    FASTEAGLE_KERNEL_FLAGS=-DFASTEAGLE_PHASES python scripts/pass_table.py --int4
    python scripts/pass_table.py --experts 2048,1024,64,8

The flag builds a library of our CPU kernels whose first thread times its parts; `waiting` is its
time at barriers. A pass is timed in blocks of passes of equal rows, as decoding runs them.

`--experts D,F,E,k` times layers of k of E experts alone instead, random and at int4-g32, beside
layers of one MLP with the weights of k experts: model dim D, F hidden columns an expert. The share
is that of the memory bandwidth, by the bytes of the experts that were chosen.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence

import click
import torch
from torch import Tensor, nn

from fasteagle.bench.linear_cases import random_weight
from fasteagle.bench.measure import read_bandwidth
from fasteagle.cli.command import Script
from fasteagle.cli.options import Numbers, model_options
from fasteagle.compile.cpu_blocks import block_tensors
from fasteagle.compile.measurement import Measurement
from fasteagle.config import ModelConfig, MoEConfig
from fasteagle.errors import FasteagleError
from fasteagle.loading.open import open_model
from fasteagle.model import Block, MoE, RMSNorm
from fasteagle.options import RuntimeOptions
from fasteagle.quant import cpu_build
from fasteagle.quant.cpu_linear import NativeLinear, in_huge_pages
from fasteagle.tables import print_table

BLOCK, WARM = 40, 10  # passes of equal rows in a row, of which the first are not counted
LAYERS_BYTES = 2**30  # of the layers that are timed together, so that no cache holds them
HEAD_DIM = 32  # of the one attention head of a layer whose FFN is timed


@click.command(cls=Script, help=__doc__)
@model_options
@click.option("--rows", default="1,2,3,4,5,6,8,12,16", show_default=True, type=Numbers())
@click.option("--experts", type=Numbers(), help="Time layers of experts: D,F,E,k.")
def main(
    model: str,
    runtime_options: RuntimeOptions,
    rows: tuple[int, ...],
    experts: tuple[int, ...] | None,
) -> None:
    if experts is not None:
        if len(experts) != 4 or min(experts) < 1:
            raise FasteagleError(f"--experts {experts} are not D,F,E,k: give four numbers above 0")
        cpu_build.load()
        D, F, n_expert, top_k = experts
        moe = MoEConfig(n_expert=n_expert, top_k=top_k, ffn_dim=F, renormalize=True)
        print_experts(D, moe, rows)
    else:
        print_parts(model, runtime_options, rows)


def print_parts(model: str, runtime_options: RuntimeOptions, rows: Sequence[int]) -> None:
    engine = open_model(model, runtime_options).loaded(runtime_options).engine
    phases = torch.ops.fasteagle_cpu.phases
    measurement = Measurement(engine, None)
    table: dict[str, list[float]] = {"pass": []}
    for T in rows:
        for _ in range(WARM):
            measurement.verify(T)
        phases()
        times = [measurement.verify(T) for _ in range(BLOCK)]
        for name, total in phases().items():
            table.setdefault(name, []).append(total / BLOCK)
        table["pass"].append(statistics.median(times))
    if not sum(table["waiting"]):
        raise FasteagleError(
            "the kernels do not time their parts: set FASTEAGLE_KERNEL_FLAGS=-DFASTEAGLE_PHASES"
        )
    print_table(
        ["ms of", *(f"{T} rows" for T in rows)],
        [[name, *(f"{ms:.3f}" for ms in times)] for name, times in table.items()],
    )


class Layers:
    """Blocks of random packed weights, equal but for their memory, with next to no attention."""

    def __init__(self, D: int, ffn_dim: int, moe: MoEConfig | None = None) -> None:
        shape = {"n_layer": 1, "n_head": 1, "n_kv_head": 1, "head_dim": HEAD_DIM}
        config = ModelConfig(dim=D, **shape, ffn_dim=ffn_dim, vocab_size=1, max_seq_len=64, moe=moe)
        block = random_block(config)
        self.ffn = block.mlp
        self._bytes = self.ffn.gate_up.packed.nbytes + self.ffn.down.packed.nbytes
        n = max(2, -(-LAYERS_BYTES // self._bytes))
        blocks = [block, *(copy.deepcopy(block) for _ in range(n - 1))]
        in_huge_pages(module for each in blocks for module in each.modules())
        self._tensors = [tensor for each in blocks for tensor in block_tensors(each)]
        self._caches = [torch.zeros(1, 64, HEAD_DIM) for _ in range(2 * n)]
        self._n = n

    def ms(self, x: Tensor) -> float:
        """Return the milliseconds of one layer for rows x [T, D]."""
        T = len(x)
        rows = x, *torch.ones(2, T, HEAD_DIM), torch.arange(T)
        seen = torch.ones(T, 64, dtype=torch.bool).tril(), None, None, None, 0
        begin = time.perf_counter()
        torch.ops.fasteagle_cpu.blocks(*rows, *seen, self._caches, self._tensors, 1, 1e-5)
        return 1e3 * (time.perf_counter() - begin) / self._n

    def n_bytes(self, x: Tensor) -> float:
        """Return the bytes of the weights that rows x [T, D] read in a layer."""
        if not isinstance(self.ffn, MoE):
            return self._bytes
        return self._bytes * len(self.ffn.route(x)[0].unique()) / self.ffn.config.n_expert


def random_block(config: ModelConfig) -> Block:
    """Return a block with random weights at int4-g32."""
    with torch.device("meta"):
        block = Block(config)
    for name, module in list(block.named_modules()):
        if isinstance(module, RMSNorm):
            block.set_submodule(name, RMSNorm(config.dim, config.norm_eps))
        elif isinstance(module, nn.Linear):
            N, K = module.weight.shape
            is_router = name.endswith("router")
            packed = NativeLinear(random_weight("int4-g32-offsets", N, K), None)
            block.set_submodule(name, nn.Linear(K, N, bias=False) if is_router else packed)
    return block.requires_grad_(False)


@torch.no_grad()
def print_experts(D: int, config: MoEConfig, rows: Sequence[int]) -> None:
    bandwidth = read_bandwidth()
    sparse, dense = Layers(D, 32, config), Layers(D, config.active_ffn_dim)
    lines = []
    for T in rows:
        times: list[list[float]] = [[], []]
        read = []
        for _ in range(WARM + BLOCK):
            x = torch.randn(T, D)  # other experts each time
            read.append(sparse.n_bytes(x))
            for each, layers in zip(times, (sparse, dense), strict=True):
                each.append(layers.ms(x))
        ms, dense_ms = (statistics.median(each[WARM:]) for each in times)
        ratio = statistics.mean(read) / dense.n_bytes(x)
        share = statistics.mean(read) / ms / 1e6 / bandwidth
        cells = f"{ms:.3f}", f"{dense_ms:.3f}", f"{ms / dense_ms:.2f}", f"{ratio:.2f}"
        lines.append((str(T), *cells, f"{share:.0%}"))
    title = f"a layer, {config.top_k} of {config.n_expert} experts; memory {bandwidth:.1f} GB/s"
    headings = "rows", "ms", "ms of one MLP", "times", "bytes, times", "share of bandwidth"
    print_table(headings, lines, title=title)


if __name__ == "__main__":
    main()
