"""Decoding whose cycles need nothing of the host: extend, expand, rerank, verify, accept, commit.

One step per tree shape over one set of buffers, replayed as a CUDA graph where there is one. The
host only reads what came out, and by then the next cycle has been launched. When an answer ends
there, that cycle's result is dropped: rows behind the committed ones are never read.

Shapes: T tree rows, D the deepest level of all shapes, F feature dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from fasteagle.compile.graphs import GraphRunner
from fasteagle.drafters import EagleDrafter
from fasteagle.drafting.head_state import head_extend
from fasteagle.generate import Engine
from fasteagle.model import KEY_BLOCK, KVCache
from fasteagle.options import SamplingParams
from fasteagle.sampling import draw
from fasteagle.tree import DraftTree, TreeShape, ancestor_mask
from fasteagle.verify import PAD, accept

MOST_PARAMS = 2  # ways to draw whose captures are kept; the oldest goes


@dataclasses.dataclass
class StaticBuffers:
    """Everything that one cycle leaves for the next, at fixed addresses; the complete list.

    Between cycles: `seq_len` tokens are committed, their keys and values in `cache`; the head's
    `head_cache` holds all of them but the last `count`, whose pairs are the first rows of `tokens`
    and `features`; `root` follows the committed tokens. `result` is what the host reads.
    """

    seq_len: Tensor  # 0-d int64
    count: Tensor  # [1] int64, 1 .. D + 1
    root: Tensor  # [1] int64
    tokens: Tensor  # [D + 1] int64
    features: Tensor  # [D + 1, F]
    result: Tensor  # [D + 1] int64, new tokens, then PAD
    cache: KVCache
    head_cache: KVCache

    @classmethod
    def make(cls, engine: Engine, drafter: EagleDrafter, depth: int) -> StaticBuffers:
        def ints(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.long, device=engine.device)

        dim = engine.model.config.dim
        features = torch.zeros(depth + 1, dim, dtype=engine.dtype, device=engine.device)
        return cls(
            torch.zeros((), dtype=torch.long, device=engine.device),
            ints(1),
            ints(1),
            ints(depth + 1),
            features,
            ints(depth + 1),
            engine.cache,
            drafter.state.cache,
        )

    @property
    def advanced(self) -> list[Tensor]:
        """What a cycle changes, but for rows behind the text."""
        return [self.seq_len, self.count, self.root, self.tokens, self.features, self.result]

    def load(self, seq_len: int, root: int, tokens: Tensor, features: Tensor) -> None:
        """Begin where the host stands; `tokens` [n] and `features` [n, F] are the pairs."""
        n = len(tokens)
        self.seq_len.fill_(seq_len)
        self.count.fill_(n)
        self.root.fill_(root)
        self.tokens[:n] = tokens
        self.features[:n] = features


class StaticCycles:
    """Decoding by static cycles with one EAGLE drafter; `Engine.captured` of an engine.

    `shapes` are the trees that may be asked for; a plain pass is always among them. The drafter's
    pilot, if it has one, chooses for each cycle.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: EagleDrafter,
        shapes: Sequence[TreeShape],
        ahead: bool | None = None,
    ) -> None:
        self._engine, self._drafter = engine, drafter
        cuda = engine.device.type == "cuda"
        self._ahead = cuda if ahead is None else ahead  # launch a cycle before the last is read
        self._shapes = tuple(shapes)
        self._depth = max(shape.depth for shape in shapes)
        self._most_rows = max(shape.rows for shape in shapes)
        drafter.state.make_room(
            self._depth + 1 + max((shape.depth - 1) * shape.topk for shape in shapes)
        )
        self.buffers = StaticBuffers.make(engine, drafter, self._depth)
        self._runners: dict[SamplingParams, dict[TreeShape | None, GraphRunner]] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if cuda else None
        # Two places to read from: one is filled while the other is read.
        self._host = [
            self.buffers.result.new_full((self._depth + 1,), PAD, device="cpu") for _ in range(2)
        ]
        if cuda:
            self._host = [place.pin_memory() for place in self._host]
        self._events = [torch.cuda.Event() for _ in range(2)] if cuda else []

    @property
    def error(self) -> str | None:
        """Why something could not be captured; it runs all the same."""
        runners = (runner for kept in self._runners.values() for runner in kept.values())
        return next((runner.error for runner in runners if runner.error), None)

    def takes(self, params: SamplingParams, seen: Tensor | None) -> bool:
        """Whether answers drawn like this may be; a repetition penalty is left to the engine."""
        return seen is None and self._engine.drafter is self._drafter

    def cycles(
        self, root_id: int, pairs: tuple[Tensor, Tensor], params: SamplingParams
    ) -> Generator[list[int]]:
        """Like `Engine.cycles`, a cycle ahead of it."""
        engine, drafter, state = self._engine, self._drafter, self._drafter.state
        drafter.extend(*pairs, len(engine.cached) - drafter.length)  # all but what is new, below
        drafter.rewind(len(engine.cached) - 1)
        self.buffers.load(len(engine.cached), root_id, pairs[0][-1:], pairs[1][-1:])
        runners = self._for(params)
        launched: list[tuple[int, TreeShape | None]] = []
        place, root = 0, root_id
        try:
            while True:
                # Between launch and read the host knows only how far the text may have come.
                reach = len(engine.cached) + (self._depth + 1) * len(launched)
                if not launched or self._fits(reach):
                    shape = drafter.pilot.shape if drafter.pilot else drafter.shape
                    self._launch(runners, shape, place, reach)
                    launched.append((place, shape))
                    place = 1 - place
                    if len(launched) == 1 and self._ahead:
                        continue  # the next one as well, before the first is read
                at, shape = launched.pop(0)
                new = self._committed(at, root, shape)
                root = new[-1]
                yield new
        finally:
            state.shared_seq_len = None
            if self._events:
                torch.cuda.current_stream(engine.device).synchronize()

    def _fits(self, seq_len: int) -> bool:
        """Whether a cycle that begins at `seq_len` stays within the caches and the RoPE tables."""
        engine = self._engine
        limit = engine.max_seq_len + KEY_BLOCK
        if not engine.on_cpu:
            limit = min(limit, engine.cache.n_slots)
        return seq_len + self._depth + self._most_rows < limit

    def _launch(
        self,
        runners: dict[TreeShape | None, GraphRunner],
        shape: TreeShape | None,
        place: int,
        reach: int,
    ) -> None:
        if self._engine.on_cpu:
            self._engine.reserve(reach + self._most_rows)
            self._drafter.state.reserve(reach + self._depth + 1)
        self._drafter.state.shared_seq_len = self.buffers.seq_len
        runners[shape].replay()
        self._host[place].copy_(self.buffers.result, non_blocking=True)
        if self._events:
            self._events[place].record()

    def _committed(self, place: int, root: int, shape: TreeShape | None) -> list[int]:
        """What a launched cycle has found, entered into the host's books."""
        engine, stats = self._engine, self._engine.stats
        if self._events:
            self._events[place].synchronize()
        new = engine.read(self._host[place].tolist())
        self._drafter.state.length = len(engine.cached)  # the cycle began with showing it these
        engine.cached.extend([root, *new[:-1]])
        if shape is not None:
            stats.drafted += shape.nodes
            stats.path_lengths.append(len(new) - 1)
        pilot = self._drafter.pilot
        if pilot is None or pilot.shape == shape:  # what it had changed already teaches nothing
            self._drafter.learn(None if shape is None else len(new) - 1)
        return new

    def _for(self, params: SamplingParams) -> dict[TreeShape | None, GraphRunner]:
        """Runners that draw like this; captured when each is first used."""
        if params.greedy:
            params = dataclasses.replace(params, seed=0)  # nothing is drawn with it
        if params not in self._runners:
            while len(self._runners) >= MOST_PARAMS:
                del self._runners[next(iter(self._runners))]
            self._runners[params] = {
                shape: GraphRunner(
                    self._step(shape, params),
                    self._engine.device,
                    self._pool,
                    self.buffers.advanced,
                )
                for shape in [None, *self._shapes]
            }
        return self._runners[params]

    def _step(self, shape: TreeShape | None, params: SamplingParams) -> Callable[[], None]:
        """One cycle over the buffers; without a shape, a plain pass that the head sees too."""
        engine, drafter, b = self._engine, self._drafter, self.buffers
        state = drafter.state
        depth = 0 if shape is None else shape.depth

        def step() -> None:
            with torch.no_grad():
                state.logits, state.feature = head_extend(
                    state.head,
                    state.cache,
                    b.tokens,
                    b.features,
                    b.seq_len - b.count[0],
                    b.count - 1,
                )
                tree = drafter.tree_of(shape, b.root, params) if shape else root_alone(b.root)
                tree_mask, depths = ancestor_mask(tree.parents, tree.valid)
                output = engine.verify_at(b.seq_len, tree.tokens, depths, tree_mask)
                levels = torch.arange(depth + 1, device=b.root.device)
                drawn = draw(output.logits, b.seq_len + 1 + levels, params, None, depths)
                path = accept(drawn, tree, tree_mask, depths, depth)
                b.cache.commit(b.seq_len + path.rows, b.seq_len + levels)
                b.result.fill_(PAD)
                b.result[: depth + 1] = path.emitted
                last = (path.count - 1).unsqueeze(0)
                b.root.copy_(path.emitted.index_select(0, last).clamp(min=0))
                b.tokens[: depth + 1] = path.emitted.clamp(min=0)
                b.features[: depth + 1] = output.features[path.rows]
                b.count.copy_(path.count.unsqueeze(0))
                b.seq_len.add_(path.count)

        return step


def use_static_cycles(engine: Engine) -> None:
    """Let a CUDA engine with an EAGLE tree replay whole cycles; others stay as they are."""
    drafter = engine.drafter
    if engine.device.type == "cuda" and isinstance(drafter, EagleDrafter):
        shapes = drafter.pilot.plan.shapes if drafter.pilot else []
        engine.captured = StaticCycles(engine, drafter, shapes or [drafter.shape])


def root_alone(root: Tensor) -> DraftTree:
    """The tree of plain decoding."""
    return DraftTree(root, torch.zeros_like(root), torch.ones_like(root).bool())
