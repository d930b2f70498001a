"""Block-wise `torch.compile`, in the background if asked, with a cache that outlives the process.

One decoder block is compiled, not the model: all blocks share its code, so that it takes seconds.
Rows and cache slots are dynamic dimensions: one graph for one row, one for two or more.

Shapes: T rows, D model dim, E head dim, G KV heads, S cache slots.
"""

from __future__ import annotations

import functools
import os
import threading
import time

import torch
from torch import Tensor

from fasteagle.model import KEY_BLOCK, Block, Transformer
from fasteagle.paths import cache_dir

# Above this many keys Inductor's softmax takes another summation, which is another graph.
LONG_REDUCTION = 4096


def configure() -> None:
    """Keep compiled code in the user cache, unless the person has named another place.

    Inductor reads the place from the environment, and writes its default there on import.
    """
    from torch._inductor.runtime.runtime_utils import default_cache_dir

    # Target and head blocks, one or several rows, short and long caches, by precision.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir() / "inductor")


def missing_compiler() -> str | None:
    """Why the CPU backend cannot compile here, or None if it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError, OSError):
        return "no C++ compiler found (install g++)"
    return None


class BlockCompiler:
    """Compiles `Block.forward` for a model and its draft head; `apply` makes them use the result.

    `start` works in a thread of its own, `wait` blocks until it is done. The model runs eagerly
    until `apply`. If compilation fails, `error` says why and `apply` changes nothing.
    """

    def __init__(self, model: Transformer, max_slots: int, head_block: Block | None = None) -> None:
        self.error: str | None = None
        self.seconds = 0.0
        self._model = model
        self._head_block = head_block
        self._max_slots = max_slots
        self._forward = torch.compile(Block.forward, fullgraph=True)
        self._done = threading.Event()
        self._applied = False

    @property
    def ready(self) -> bool:
        return self._done.is_set() and self.error is None

    def start(self) -> None:
        configure()
        # Guards compare these; a new thread would begin with its own.
        n_threads = torch.get_num_threads()
        threading.Thread(target=self._run, args=(n_threads,), daemon=True).start()

    def wait(self) -> None:
        self._done.wait()

    def apply(self) -> bool:
        """Switch the model's blocks to compiled code if it is ready; true if they now use it."""
        if self.ready and not self._applied:
            for block in [*self._model.blocks, *self._extra_blocks]:
                block.forward = functools.partial(self._forward, block)
            self._applied = True
        return self._applied

    def _run(self, n_threads: int) -> None:
        start = time.perf_counter()
        try:
            configure()  # again: torch's settings are those of a thread
            torch.set_num_threads(n_threads)
            if self._model.norm.weight.device.type == "cpu" and (reason := missing_compiler()):
                raise RuntimeError(reason)
            with torch.no_grad():
                self._warm_up()
        except Exception as error:  # whatever it is, the eager path still answers
            self.error = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
        self.seconds = time.perf_counter() - start
        self._done.set()

    def _warm_up(self) -> None:
        slots = [2 * KEY_BLOCK]
        if self._max_slots > LONG_REDUCTION:
            slots.append(2 * LONG_REDUCTION)
        for S in slots:
            for T in (1, 5):
                for block in (self._model.blocks[0], *self._extra_blocks):
                    self._forward(block, *self._inputs(block, T, S))

    @property
    def _extra_blocks(self) -> list[Block]:
        return [] if self._head_block is None else [self._head_block]

    def _inputs(self, block: Block, T: int, S: int) -> tuple[Tensor, ...]:
        config, weight = self._model.config, self._model.norm.weight
        n_kv_head, head_dim = block.attention.n_kv_head, block.attention.head_dim
        rope = self._model.rope_cos[:T, :1].expand(T, head_dim).unsqueeze(1)
        kv = [weight.new_zeros(n_kv_head, S, head_dim) for _ in range(2)]
        rows = torch.arange(T, device=weight.device)
        mask = torch.ones(T, S, dtype=torch.bool, device=weight.device)
        x = rope.new_zeros(T, config.dim)
        cos, sin = rope.clone(), rope.clone()
        for tensor, dim in ((kv[0], 1), (kv[1], 1), (mask, 1)):
            torch._dynamo.mark_dynamic(tensor, dim)
        if T > 1:
            for tensor in (x, cos, sin, rows, mask):
                torch._dynamo.mark_dynamic(tensor, 0)
        return x, cos, sin, rows, mask, *kv
