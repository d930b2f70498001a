"""Prompt in, tokens out: prefill, then one target pass per cycle, as a generator.

Reads in the order it runs: prefill -> verify -> accept -> commit. Knows token ids only; text,
stop strings and chat turns live in `stream` and `chat`.

Shapes: T rows, V vocabulary, S cache slots.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fasteagle.drafters import Drafter, HeadDrafter
from fasteagle.errors import FasteagleError
from fasteagle.model import KVCache, Output, Transformer, causal_mask
from fasteagle.multi_round import multi_round
from fasteagle.options import SamplingParams
from fasteagle.sampling import BAD_ROW, draw, process_logits
from fasteagle.stats import Stats
from fasteagle.tree import ancestor_mask
from fasteagle.verify import PAD, accept, seen_rows

if TYPE_CHECKING:
    from fasteagle.compile.cycles import StaticCycles

PREFILL_CHUNK = 256
FEW_PAIRS = 8  # a follow-up question may compute so many rows twice
MAX_TREE_ROWS = 64  # cache rows kept free behind the context for tokens not yet committed


class Engine:
    """One model, one sequence: the KV cache, the tokens it holds, and a drafter if there is one.

    `cached` are the tokens whose keys and values lie in slots `0 .. len(cached) - 1`; anything
    behind is never read. Without a drafter, `plain_rows` is how many rows a pass computes: 2 where
    the kernels are faster at two rows than at one (see `choose_plain_rows`); the second row is
    thrown away.
    """

    def __init__(
        self,
        model: Transformer,
        max_seq_len: int,
        plain_rows: int = 1,
        drafter: Drafter | None = None,
    ) -> None:
        self.model = model
        self.max_seq_len = max_seq_len
        self.plain_rows = plain_rows
        self.drafter = drafter
        self.device = model.norm.weight.device
        self.dtype = model.norm.weight.dtype
        self.on_cpu = self.device.type == "cpu"
        n_slots = 0 if self.on_cpu else max_seq_len + MAX_TREE_ROWS
        self.cache = KVCache(model.config, max(n_slots, 1), self.dtype, self.device)
        self.cached: list[int] = []
        self.stats = Stats()
        self.captured: StaticCycles | None = None  # replays whole cycles, where a device can

    def use(self, drafter: Drafter | None) -> None:
        """Draft with `drafter` from the next answer on, or not at all."""
        if drafter is not None:
            drafter.rewind(0)  # whatever it has seen may have been another conversation
        self.drafter = drafter

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: frozenset[int] = frozenset(),
    ) -> Iterator[list[int]]:
        """Yield newly committed tokens, cycle by cycle, up to and including an end-of-text token.

        Whatever part of `prompt` the cache already holds is not computed again. Closing the
        generator, or an exception in it, leaves the engine ready for the next call.
        """
        start = time.perf_counter()
        self._check_prompt(prompt)
        self.stats = stats = Stats(prompt_tokens=len(prompt))
        seen = self._seen(prompt, params)
        features, stats.cached_tokens = self.prefill(prompt)
        positions = torch.tensor([len(prompt)], device=self.device)
        root = draw(self.model.lm_head(features), positions, params, seen)
        new = self.read(root.tolist())
        pairs = (root, features)  # committed since the drafter last saw any
        first = time.perf_counter()
        stats.ttft = first - start
        captured = self.captured
        if captured is not None and captured.takes(params, seen):
            cycles = captured.cycles(new[-1], pairs, params)
        else:
            cycles = self.cycles(new[-1], pairs, params, seen)
        while True:
            kept = self._until_end(new, max_new_tokens, eos_ids)
            stats.new_tokens += len(kept)
            elapsed = time.perf_counter() - first
            if stats.passes:
                stats.cycle_seconds.append(elapsed - stats.decode_seconds)
            stats.decode_seconds = elapsed
            yield kept
            if stats.finish:
                cycles.close()
                return
            new = next(cycles)
            stats.passes += 1

    def cycles(
        self,
        root_id: int,
        pairs: tuple[Tensor, Tensor],
        params: SamplingParams,
        seen: Tensor | None,
    ) -> Generator[list[int]]:
        """New tokens, cycle by cycle, without end; `cached` holds all but the last of them."""
        new = [root_id]
        try:
            while True:
                new, pairs = self._cycle(new[-1], pairs, params, seen)
                yield new
        finally:
            if self.stats.finish:
                self._catch_up(pairs)

    def _cycle(
        self,
        root_id: int,
        pairs: tuple[Tensor, Tensor],
        params: SamplingParams,
        seen: Tensor | None,
    ) -> tuple[list[int], tuple[Tensor, Tensor]]:
        """Whichever cycle is due; `pairs` are what the drafter has not seen yet."""
        drafter = self.drafter
        if drafter is None:
            return self._plain_cycle(root_id, params, seen)
        if not drafter.rests():
            return self._draft_cycle(root_id, pairs, params, seen)
        count = len(self.cached) - drafter.length
        new, more = self._plain_cycle(root_id, params, seen)
        drafter.learn(None)
        tokens, features = (torch.cat((old[:count], a)) for old, a in zip(pairs, more, strict=True))
        return new, (tokens, features)

    def _draft_cycle(
        self,
        root_id: int,
        pairs: tuple[Tensor, Tensor],
        params: SamplingParams,
        seen: Tensor | None,
    ) -> tuple[list[int], tuple[Tensor, Tensor]]:
        """One cycle: extend, propose, verify, accept, commit. The new tokens, and their pairs."""
        drafter = self.drafter
        assert drafter is not None
        begin = self.now()
        # The drafter sees the true features of what was committed, then guesses what follows.
        count = len(self.cached) - drafter.length
        drafter.extend(*pairs, count)
        root = torch.tensor([root_id], device=self.device)
        tree = drafter.propose(root, [*self.cached, root_id], params)
        drafted = self.now()
        self.stats.draft_seconds += drafted - begin
        if tree is None:
            drafter.learn(None)
            return self._plain_cycle(root_id, params, seen)

        tree_mask, depths = ancestor_mask(tree.parents, tree.valid)
        output = self.verify(tree.tokens, depths, tree_mask)
        verified = self.now()

        # The target draws at every row; the path along its own draws is what it would have said.
        base = len(self.cached)
        rows_seen = None if seen is None else seen_rows(seen, tree, tree_mask)
        proposals = getattr(drafter, "proposals", None)
        if proposals is None:
            positions = base + 1 + torch.arange(drafter.depth + 1, device=self.device)
            drawn = draw(output.logits, positions, params, rows_seen, depths)
            path = accept(drawn, tree, tree_mask, depths, drafter.depth)
        else:  # children were sampled: the paper's algorithm instead
            probs = process_logits(output.logits.float(), params, rows_seen).softmax(-1)
            path = multi_round(probs, proposals, tree, drafter.depth, params.seed, base)

        new = self.read(path.emitted.tolist())  # the one read of the host in a cycle
        # Accepted rows that lie where they belong already, as the likeliest ones do, stay there.
        in_order = torch.arange(len(new), device=self.device)
        rows = path.rows[: len(new)]
        if not self.on_cpu or not torch.equal(rows, in_order):
            self.cache.commit(base + rows, base + in_order)
        self.cached.extend([root_id, *new[:-1]])
        if seen is not None:
            seen[:, torch.tensor([root_id, *new], device=self.device)] = True
        stats = self.stats
        stats.verify_seconds += verified - drafted
        stats.drafted += int(tree.valid.sum()) - 1
        stats.path_lengths.append(len(new) - 1)
        drafter.learn(len(new) - 1)
        return new, (path.emitted.clamp(min=0), output.features[path.rows])

    def _plain_cycle(
        self, root_id: int, params: SamplingParams, seen: Tensor | None
    ) -> tuple[list[int], tuple[Tensor, Tensor]]:
        """Verify a tree that is only the root, and commit it."""
        T = self.plain_rows
        tokens = torch.zeros(T, dtype=torch.long, device=self.device)
        tokens[0] = root_id
        tree_mask = torch.eye(T, dtype=torch.bool, device=self.device)
        if seen is not None:
            seen[:, root_id] = True
        begin = self.now()
        output = self.verify(tokens, torch.zeros_like(tokens), tree_mask)
        self.stats.verify_seconds += self.now() - begin
        positions = torch.tensor([len(self.cached) + 1], device=self.device)
        root = draw(output.logits[:1], positions, params, seen)
        new = self.read(root.tolist())
        self.cached.append(root_id)
        return new, (root, output.features[:1])

    def _catch_up(self, pairs: tuple[Tensor, Tensor]) -> None:
        """Show the drafter what it slept through, lest the next prompt pays for it."""
        drafter = self.drafter
        count = 0 if drafter is None else len(self.cached) - drafter.length
        if drafter is not None and count > FEW_PAIRS:
            drafter.extend(*pairs, count)

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> tuple[Tensor, int]:
        """Bring the cache to hold exactly `prompt`, and the drafter all of it but the last pair.

        Returns the features [1, D] of the last token, and how many tokens were there already.
        """
        same = common_prefix(self.cached, prompt)
        kept = min(same, len(prompt) - 1)  # the last row is always computed: it yields the logits
        if self.drafter is not None:
            # The drafter's pairs are a feature and the token after it. The last token that is the
            # same may have another one after it now, and only a pass brings its feature back.
            kept = max(0, min(kept if same == len(prompt) else same - 1, self.drafter.length))
            self.drafter.rewind(kept)
        del self.cached[kept:]
        self.reserve(len(prompt))
        for begin in range(kept, len(prompt), PREFILL_CHUNK):
            chunk = prompt[begin : begin + PREFILL_CHUNK]
            features = self._run(chunk, begin)
            self.cached.extend(chunk)
            if self.drafter is not None:
                after = prompt[begin + 1 : begin + len(chunk) + 1]
                if after:
                    tokens = torch.tensor(after, device=self.device)
                    self.drafter.extend(tokens, features[: len(after)], len(after))
        return features[-1:], kept

    def _run(self, ids: Sequence[int], begin: int) -> Tensor:
        """Features of `ids` run behind the `begin` rows before them, reserved already."""
        tokens = torch.tensor(ids, device=self.device)
        rows = torch.arange(begin, begin + len(ids), device=self.device)
        window = self.model.config.sliding_window
        mask = causal_mask(begin, len(ids), self.cache.n_slots, window, self.device)
        return self.model.encode(tokens, rows, rows, mask, self.cache)[0]

    @torch.no_grad()
    def features(self, ids: Sequence[int]) -> Tensor:
        """Features [len(ids), D] of every token of a text, for training; forgets the cache."""
        self.cached.clear()
        self.reserve(len(ids))
        starts = range(0, len(ids), PREFILL_CHUNK)
        return torch.cat([self._run(ids[at : at + PREFILL_CHUNK], at) for at in starts])

    def verify(self, tokens: Tensor, depths: Tensor, tree_mask: Tensor) -> Output:
        """One target pass over T uncommitted rows behind the committed prefix.

        `depths` [T] count from the root (0); `tree_mask` [T, T] (bool): row j sees row i.
        """
        seq_len = len(self.cached)
        self.reserve(seq_len + tokens.shape[0])
        return self.verify_at(seq_len, tokens, depths, tree_mask)

    def verify_at(
        self, seq_len: int | Tensor, tokens: Tensor, depths: Tensor, tree_mask: Tensor
    ) -> Output:
        """`verify` behind `seq_len` committed tokens, a number of the host's or 0-d on the device.

        Reads nothing back, so that it can be captured.
        """
        T = tokens.shape[0]
        positions = seq_len + depths
        slots = seq_len + torch.arange(T, device=self.device)
        window = self.model.config.sliding_window
        if self.model.takes_tree_view:
            from fasteagle.compile.tree_attention import TreeView, tree_paths

            length = torch.as_tensor(seq_len, device=self.device)
            view = TreeView(length, tree_paths(tree_mask, depths, T - 1), depths, window)
            return self.model(tokens, positions, slots, view, self.cache)
        # Rows of one depth see the same committed keys: those of a causal row at their position.
        keys = torch.arange(self.cache.n_slots, device=self.device)
        mask = (keys < seq_len).expand(T, -1)
        if window is not None:
            mask = mask & (keys > (positions - window).unsqueeze(1))
        mask = mask.index_copy(1, slots, tree_mask)
        return self.model(tokens, positions, slots, mask, self.cache)

    def now(self) -> float:
        """Seconds on a clock, once the device has done what was asked of it."""
        if not self.on_cpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def reserve(self, n_slots: int) -> None:
        """Make room in a cache that grows with the text; on CUDA it has its full size."""
        if self.on_cpu:
            self.cache.resize(n_slots)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise FasteagleError("the prompt is empty: give at least one token")
        if len(prompt) >= self.max_seq_len:
            raise FasteagleError(
                f"the prompt has {len(prompt):,} tokens, max-seq-len {self.max_seq_len:,} leaves "
                f"room for {self.max_seq_len - 1:,}: shorten it or raise --max-seq-len"
            )
        low, high = min(prompt), max(prompt)
        vocab_size = self.model.config.vocab_size
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise FasteagleError(f"token id {bad} is outside the vocabulary of {vocab_size:,}")

    def _seen(self, prompt: Sequence[int], params: SamplingParams) -> Tensor | None:
        """Tokens under the repetition penalty so far, [1, V], or None where it is off."""
        if params.repetition_penalty == 1:
            return None
        vocab_size = self.model.config.vocab_size
        seen = torch.zeros(1, vocab_size, dtype=torch.bool, device=self.device)
        seen[0, torch.tensor(prompt, device=self.device)] = True
        return seen

    def read(self, drawn: list[int]) -> list[int]:
        """`drawn` without its padding. Raises `FasteagleError` where logits were not finite."""
        tokens = [token for token in drawn if token != PAD]
        position = len(self.cached)
        if BAD_ROW in tokens:
            self._forget_everything()
            dtype = str(self.dtype).removeprefix("torch.")
            fixes = {torch.float16: "try --dtype bf16 or fp32, or ", torch.float32: ""}
            raise FasteagleError(
                f"the model's logits are not finite in {dtype} at position {position}: "
                f"{fixes.get(self.dtype, 'try --dtype fp32, or ')}fetch the weights again"
            )
        return tokens

    def _forget_everything(self) -> None:
        """Clear the caches, for a NaN in a row behind the text would spoil every later answer.

        Attention multiplies the rows it does not look at by zero, and zero times NaN is NaN.
        """
        self.cached.clear()
        caches = [self.cache]
        if self.drafter is not None:
            self.drafter.rewind(0)
        if isinstance(self.drafter, HeadDrafter):
            caches.append(self.drafter.state.cache)
        for cache in caches:
            cache.clear()

    def _until_end(self, new: list[int], max_new_tokens: int, eos_ids: frozenset[int]) -> list[int]:
        """The part of `new` up to the end of the answer, if it is in there; sets `finish`.

        What lies behind is taken back: the cache then holds all but the last token that is kept.
        """
        before = len(self.cached) - (len(new) - 1)
        for i, token in enumerate(new):
            if token in eos_ids:
                self.stats.finish = "eos"
            elif self.stats.new_tokens + i + 1 >= max_new_tokens:
                self.stats.finish = "length"
            elif before + i + 1 >= self.max_seq_len:
                # This token takes the last slot; its successor would need one more.
                self.stats.finish = "context"
            else:
                continue
            del self.cached[before + i :]
            if self.stats.path_lengths:  # guesses behind the end were right, but for nothing
                self.stats.path_lengths[-1] = min(self.stats.path_lengths[-1], i + 1)
            return new[: i + 1]
        return new


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that `a` and `b` share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


@torch.no_grad()
def choose_plain_rows(
    engine: Engine, budget: float = 0.5, clock: Callable[[], float] = time.perf_counter
) -> int:
    """1 or 2, whichever makes a target pass faster here (some bf16 CPU kernels prefer two rows).

    Times both in turn for about `budget` seconds on rows behind the committed ones, which are
    never read: the conversation is untouched.
    """
    if not engine.on_cpu or len(engine.cached) + 2 > engine.max_seq_len:
        return 1
    times: dict[int, list[float]] = {1: [], 2: []}
    begin = clock()
    while len(times[2]) < 4 or clock() - begin < budget:
        for T in (1, 2):
            tokens = torch.zeros(T, dtype=torch.long)
            start = clock()
            engine.verify(tokens, tokens, torch.eye(T, dtype=torch.bool))
            times[T].append(clock() - start)
    return min(times, key=lambda T: statistics.median(times[T][1:]))  # the first one warms up
