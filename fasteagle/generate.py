"""Engine: a generator of new tokens by prefill, then one decode cycle after the other.

The cycle itself is in `cycle`, prefill in `context`. This module checks the prompt, runs the loop,
ends the answer and counts its statistics. It knows token ids only; text, stop strings and chat
turns are in `stream` and `answer`.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from fasteagle.decoding.backend import Backend
from fasteagle.decoding.context import MAX_TREE_ROWS, Context
from fasteagle.decoding.launch import Done, End
from fasteagle.decoding.stats import Stats
from fasteagle.device import unless_short
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.policy import Outcome
from fasteagle.errors import EngineError, FasteagleError
from fasteagle.logits import LogitsProcessor
from fasteagle.model import KEY_BLOCK, KVCache, Transformer
from fasteagle.options import SamplingParams
from fasteagle.sampling import BAD_ROW, SamplingMode, draw
from fasteagle.shapes import MAX_DEPTH, AnyShape, check_rows
from fasteagle.state import PENDING, READ_AT_ONCE, CycleSpec, runs_head
from fasteagle.tree import chain
from fasteagle.verify import PAD


class Engine(Context):
    """`Context` that answers prompts by prefill and decode cycles, and ends the answers.

    `backend` runs the model, by default the core itself; `runner` is its part for this engine.
    Engines that share a `cache` take turns: each must `restart` after another one has used it.
    """

    def __init__(
        self,
        model: Transformer,
        max_seq_len: int,
        drafter: Drafter | None = None,
        cache: KVCache | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(model, max_seq_len, cache, backend)
        self.stats = Stats()
        self.use(drafter)

    def sibling(self, cache: KVCache | None = None) -> Engine:
        """Return another engine over the same model and backend; `cache` may be this one's."""
        other = Engine(self.model, self.max_seq_len, cache=cache, backend=self.backend)
        other.runner.share_compiled(self.runner)
        return other

    def use(self, drafter: Drafter | None) -> None:
        """Draft with `drafter` from the next answer on; None: decode plainly."""
        shapes = [] if drafter is None else drafter.shapes()
        deepest = max((shape.depth for shape in shapes), default=0)
        if deepest > MAX_DEPTH:
            raise FasteagleError(f"tree-depth {deepest} is out of range: use at most {MAX_DEPTH}")
        rows = max((shape.rows for shape in shapes), default=0)
        if self.fixed_slots is not None and rows >= self.fixed_slots:
            raise FasteagleError(
                f"tree-nodes {rows - 1:,} is out of range: max-seq-len {self.max_seq_len:,} leaves "
                f"room for {self.fixed_slots - 2:,}"
            )
        check_rows(rows, self.backend.most_rows)
        self._set_known(0)  # the drafter may have seen another conversation
        self.drafter = drafter
        self._specs_of: dict[object, CycleSpec] = {}
        self._reach = 0  # most tokens of this answer that caches have had room for
        if drafter is not None:
            self.runner.adopt(drafter)
        aux_layers = () if drafter is None else drafter.aux_layers
        if aux_layers != self.state.aux_layers:
            self.state.read_aux_layers(aux_layers, self.model.config.dim)
            self.runner.forget()  # captured cycles write to the old tensors

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: frozenset[int] = frozenset(),
        *,
        processor: LogitsProcessor | None = None,
        speculate: bool = True,
        is_last: Callable[[int], bool] = lambda token: False,
        stats: Stats | None = None,
    ) -> Generator[list[int]]:
        """Yield newly committed tokens, cycle by cycle, up to and including an end-of-text token.

        Where the runner `waits`, it yields an empty list too: before the first token after each
        pass of the prompt, and whenever a cycle waits to be run with those of other engines.

        `is_last` is called with every other token once, in order, before it is yielded, and returns
        whether the answer ends with it.

        A beginning of `prompt` that is cached is not computed again. Closing the generator, or an
        exception in it, leaves the engine ready for the next call. `processor` changes logits
        before tokens are drawn; without `speculate` the drafter pauses; `stats` is filled on the
        way, and is `self.stats` then. Raises `EngineError` where memory is short, after a restart.
        """
        start = time.perf_counter()
        self.check_prompt(prompt)
        self.stats = stats = stats or Stats()
        stats.prompt_tokens = len(prompt)
        kind = SamplingMode.of(params, self.model.config.vocab_size)
        unless_short(lambda: self.prepare(params, processor is not None), self._lost)
        for filled in self.prefill_parts(prompt):
            if filled is None and self.runner.waits:
                yield []
        assert filled is not None, "the last part is the result"
        normed, feature, stats.cached_tokens = filled
        root = unless_short(
            lambda: self._first_token(prompt, normed, kind, params, processor), self._lost
        )
        self._check(root, len(prompt))
        self.state.load([*self.cached, root], feature, params)
        self.runner.end, self._reach = End([*eos_ids]), 0
        new = [root]
        first = time.perf_counter()
        stats.ttft = first - start
        # Closed at any end, now: a traceback may hold them until another answer is under way.
        cycles = self._cycles(root, kind, max_new_tokens, processor, speculate)
        with contextlib.closing(cycles):
            while True:
                emitted = self._until_end(new, max_new_tokens, eos_ids, is_last)
                stats.new_tokens += len(emitted)
                if processor is not None:
                    processor.accept(emitted)
                ready = 0 if stats.finish else self.runner.ready
                stats.add_chunk(time.perf_counter() - first, ready)
                yield emitted
                if stats.finish:
                    return
                while not (new := unless_short(lambda: next(cycles), self._lost)):
                    yield []
                stats.passes += 1

    def _first_token(
        self,
        prompt: Sequence[int],
        normed: Tensor,
        kind: SamplingMode,
        params: SamplingParams,
        processor: LogitsProcessor | None,
    ) -> int:
        """Sample the token after the prompt; the LM head reads `normed` [1, D] of its last one."""
        state = self.state
        state.sampling.load(params)
        seen = None
        if kind.penalty:
            seen = state.seen.fill_(False)
            seen[0, torch.tensor(prompt, device=self.device)] = True
        position = torch.tensor([len(prompt)], device=self.device)
        logits = self.model.lm_head(normed)
        if processor is not None:
            last = torch.tensor([prompt[-1]], device=self.device)
            logits = processor(logits, chain(last, torch.ones_like(last).bool()))
        return int(draw(logits, position, kind, state.sampling, seen))

    def _cycles(
        self,
        root: int,
        kind: SamplingMode,
        most: int,
        processor: LogitsProcessor | None = None,
        speculate: bool = True,
    ) -> Generator[list[int]]:
        """Yield new tokens, cycle by cycle; `cached` holds all but the last of them.

        The answer has `most` tokens. Yields an empty list where a cycle waits to be run. Where the
        runner launches several cycles before one is read, results past the answer's end are
        dropped. A processor must see the last one first.
        """
        launched: deque[CycleSpec] = deque()
        begins: deque[tuple[float, bool]] = deque()  # whether the device may do more before it
        last_read, specs_of = 0.0, self._specs_of
        try:
            while True:
                left = min(most, self.max_seq_len) - self.stats.new_tokens
                self.runner.end = self.runner.end._replace(most=left)
                n = min(left, self.runner.ahead + self.runner.at_once if processor is None else 1)
                while len(launched) < n and not self.runner.ready:
                    shows = self.shows
                    spec = self._next_spec(kind, launched, speculate)
                    if spec is None:
                        break
                    showed = self.shows > shows and not self.on_cpu
                    begins.append((time.perf_counter(), showed))
                    self.runner.launch(spec, self.drafter, processor)
                    launched.append(spec)
                if self.runner.waits and not self.runner.ready:
                    yield []
                    while self.runner.ahead and self.runner.queued:  # the device is to be busy
                        yield []
                done = self.runner.read()
                # A cycle may have waited long for its pass, while the last chunk was read.
                begin, showed = begins.popleft()
                begin = max(begin, last_read, self.runner.began)
                last_read = time.perf_counter()
                ms = done.ms or 1e3 * (last_read - begin)
                # Else other time would be the tree's.
                is_timed = processor is None and done.alone and not showed
                new = self._record(root, launched.popleft(), done, ms if is_timed else None)
                root = new[-1]
                yield new
        finally:
            has_drafted = self.runner.drop(launched)
            is_own = self._specs_of is specs_of  # no drafter was chosen since
            if self.stats.finish and not has_drafted and is_own:
                with contextlib.suppress(EngineError):  # the answer is whole without it
                    unless_short(self._keep_pending, self._lost)

    def _next_spec(
        self, kind: SamplingMode, launched: deque[CycleSpec], speculate: bool
    ) -> CycleSpec | None:
        """Return the variant of the next cycle; None: cycles in flight must be read first."""
        drafter = self.drafter
        shape = None if drafter is None or not speculate else drafter.next_shape()
        reach = len(self.cached) + sum(spec.depth + 1 for spec in launched)
        spec = self.spec(shape, kind)
        if self.fixed_slots is not None and reach + spec.rows > self.fixed_slots:
            spec = self.spec(None, kind)  # a large tree, where the context ends
        if launched and not self._fits(reach, spec):
            return None
        if drafter is not None and self.reads:
            room = spec.width if spec.extends else PENDING - 1 - spec.depth
            resumes = drafter.may_skip_head and spec.extends and drafter.head_gain is not None
            if resumes and not launched:
                room = min(room, READ_AT_ONCE)  # those of a pause are no part of a cycle's price
            if self._most_pending(launched) > room:
                if launched:
                    return None
                self._keep_pending()
            if spec.extends:
                self._show_kept(self.cached)
        # Caches do not shrink during an answer, though a cycle may bring less than it might.
        self._reach = max(self._reach, reach)
        self.reserve(self._reach, spec.rows, spec.width)
        return spec

    def spec(
        self, shape: AnyShape | None, kind: SamplingMode, shapes: Sequence[AnyShape] = ()
    ) -> CycleSpec:
        """Return the variant of a cycle with a tree of `shape`, one of `shapes` (the drafter's)."""
        key = shape, kind
        if self.runner.ahead or key not in self._specs_of:
            self._specs_of[key] = self._new_spec(shape, kind, shapes)
        return self._specs_of[key]

    def _new_spec(
        self, shape: AnyShape | None, kind: SamplingMode, shapes: Sequence[AnyShape]
    ) -> CycleSpec:
        drafter, reads = self.drafter, self.reads
        if shape is None:
            return CycleSpec(None, int(reads), kind)
        width = int(reads)
        if drafter is not None and reads and runs_head(shape):
            # Ahead of the host, the pairs of any tree may be pending.
            pending = (shapes or drafter.shapes()) if self.runner.ahead else [shape]
            width = max(s.depth for s in pending) + 1
            if drafter.may_skip_head:
                width = PENDING - 1 - shape.depth
        accept = None if drafter is None else drafter.accept_for(kind)
        return CycleSpec(shape, width, kind, accept)

    def _most_pending(self, launched: deque[CycleSpec]) -> int:
        """Return the largest number of pairs that may be pending for the draft head."""
        most = len(self.cached) - self.known
        skips = self.drafter is not None and self.drafter.may_skip_head
        for spec in launched:
            most = spec.depth + 1 + (0 if spec.extends and not skips else most)
        return most

    def _fits(self, seq_len: int, spec: CycleSpec) -> bool:
        """Return whether a cycle from `seq_len` on stays within the caches and the RoPE tables."""
        limit = self.max_seq_len + (KEY_BLOCK if self.on_cpu else MAX_TREE_ROWS)
        return seq_len + spec.rows + spec.width < limit and seq_len <= self.max_seq_len

    def _record(self, root: int, spec: CycleSpec, done: Done, ms: float | None) -> list[int]:
        """Record a cycle, which took `ms`, on the host; return its new tokens."""
        new = [token for token in done.tokens if token != PAD]
        if done.drafted:
            self.stats.drafted += done.drafted
            self.stats.path_lengths.append(len(new) - 1)
        self.stats.add_times(done.draft_seconds, done.verify_seconds)
        extended = spec.extends if done.extended is None else done.extended
        if extended:
            self._set_known(len(self.cached))  # the drafter saw all of them as the cycle began
        if self.drafter is not None:
            outcome = Outcome(
                accepted=len(new) - 1,
                by_lookup=done.by_lookup,
                drafted=done.drafted,
                extended=extended and self.reads,
                promised=done.promised,
                ms=ms,
                draft_ms=_ms(done.draft_seconds),
                verify_ms=_ms(done.verify_seconds),
            )
            self.drafter.learn(spec.shape, outcome)
        self.cached.extend([root, *new[:-1]])
        return new

    def compile_ahead(self) -> None:
        """Let the runner compile its device's kernels now, not during the first answer."""
        self.runner.compile_ahead(self._specs(SamplingMode()), self.drafter)

    def compile_shared(self) -> None:
        """Let the runner compile what several answers share, before a second one begins."""
        self.runner.compile_shared(self._specs(SamplingMode()), self.drafter)

    def _specs(self, kind: SamplingMode) -> list[CycleSpec]:
        """Return the variants of the cycle that answers of this sampling mode may need."""
        shapes = [] if self.drafter is None else self.drafter.shapes()
        return [self.spec(shape, kind) for shape in (None, *shapes)]

    @torch.no_grad()
    def prepare(self, params: SamplingParams, processed: bool = False) -> None:
        """Let the runner prepare every cycle that answers with `params` may need.

        Where `processed`, a processor will change their logits.
        """
        kind = SamplingMode.of(params, self.model.config.vocab_size)
        drafter, specs = self.drafter, self._specs(kind)
        if not self.runner.needs(specs, drafter, processed):
            return
        rows = max(spec.rows for spec in specs)
        self.reserve(len(self.cached) + 1, rows, MAX_DEPTH)
        # Preparing runs cycles: after the text, where rows are free.
        free = min(len(self.cached) + 1, self.max_seq_len - 1)
        if self.fixed_slots is not None:
            free = min(free, self.fixed_slots - rows)
        del self.cached[free:]
        self.state.seq_len.fill_(free)
        self.state.count.fill_(1)
        self.state.sampling.load(params)
        self.runner.prepare(specs, drafter, processed)

    def _check(self, token: int, position: int) -> None:
        """Raise `EngineError` where the logits of the token at `position` were not finite."""
        if token == BAD_ROW:
            self._forget_everything()
            dtype = str(self.dtype).removeprefix("torch.")
            fixes = {torch.float16: "try --precision bf16 or fp32, or ", torch.float32: ""}
            raise EngineError(
                f"the model's logits are not finite in {dtype} at position {position}: "
                f"{fixes.get(self.dtype, 'try --precision fp32, or ')}fetch the weights again"
            )

    def _until_end(
        self,
        new: list[int],
        max_new_tokens: int,
        eos_ids: frozenset[int],
        is_last: Callable[[int], bool],
    ) -> list[int]:
        """Return `new` up to the end of the answer; set `finish` where the answer ends in it.

        Tokens past the end are removed: the cache then holds all but the last token of the answer.
        Raises `EngineError` for logits before it that were not finite.
        """
        before = len(self.cached) - (len(new) - 1)
        for i, token in enumerate(new):
            self._check(token, before + i)
            if token in eos_ids:
                self.stats.finish = "eos"
            elif is_last(token):
                self.stats.finish = "stop"
            elif self.stats.new_tokens + i + 1 >= max_new_tokens:
                self.stats.finish = "length"
            elif before + i + 1 >= self.max_seq_len:
                # This token takes the last slot; its successor would need one more.
                self.stats.finish = "context"
            else:
                continue
            del self.cached[before + i :]
            if len(new) > 1:  # tokens past the end were accepted, but truncated
                self.stats.path_lengths[-1] = min(self.stats.path_lengths[-1], i + 1)
            return new[: i + 1]
        return new


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
