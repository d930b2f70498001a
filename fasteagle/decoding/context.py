"""Cached part of a conversation: prefill, and space for further tokens.

Shapes: T rows, D model dim, R auxiliary layers, F feature dim of the draft head's input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.decoding.backend import Backend
from fasteagle.decoding.launch import head_config
from fasteagle.device import unless_short
from fasteagle.drafting.base import Drafter
from fasteagle.errors import EngineError, FasteagleError, shown
from fasteagle.model import (
    KEY_BLOCK,
    KVCache,
    PromptView,
    Target,
    Transformer,
    Visible,
    causal_mask,
    round_up,
)
from fasteagle.state import Committed, DecodeState
from fasteagle.tree import TreeView

PREFILL_CHUNK = 256
# CUDA dequantizes quantized weights once per chunk, which takes as long as some 60 rows of it.
PREFILL_CHUNK_CUDA = 1024
# Pairs a draft head is shown at once: limits its attention scores, or in tree attention the states
# of splits, 71 MB in the shape of 7B over 4,096 positions.
HEAD_CHUNK = 256
MOST_KEPT = 1024  # positions whose features wait for the draft head to be run
FEW_TOKENS = 32  # of a text: computing so many again costs no more than storing or copying them
MAX_TREE_ROWS = 64  # cache rows free past the context for tokens not yet committed


class Prefilled(NamedTuple):
    """Result of a prefill: what reads the last token, and how many tokens were cached already."""

    normed: Tensor  # [1, D], input of the LM head
    feature: Tensor  # [1, F], input of a draft head
    n_cached: int


class Context:
    """One model and one sequence: the KV cache, the tokens in it, and the drafter if any.

    `cached` are the tokens whose keys and values lie in slots `0 .. len(cached) - 1`; slots past
    them are never read. The drafter has seen `shown` of them; the features of the next ones, up to
    `known`, are `kept` until it drafts, which it may never do.
    """

    def __init__(
        self, model: Transformer, max_seq_len: int, cache: KVCache | None, backend: Backend | None
    ) -> None:
        self.model = model
        self.backend = Backend(Target(model)) if backend is None else backend
        self.max_seq_len = max_seq_len
        self.device = model.norm.weight.device
        self.dtype = model.norm.weight.dtype
        self.on_cpu = self.device.type == "cpu"
        n_slots = 0 if self.on_cpu else max_seq_len + MAX_TREE_ROWS
        self.cache = self.target.new_cache(max(n_slots, 1)) if cache is None else cache
        self.state = DecodeState(model, self.cache, max_seq_len)
        self.runner = self.backend.runner(self.state)
        self.cached: list[int] = []
        self.shown = self.known = 0  # committed positions
        self.kept: list[Tensor] = []  # [n, F] each
        self.shows = 0  # times that the drafter was shown what was kept
        self.drafter: Drafter | None = None

    @property
    def target(self) -> Target:
        """Model as the backend runs it."""
        return self.backend.target

    @property
    def origin(self) -> Drafter | None:
        """Drafter whose siblings fill the caches alike; None without a drafter."""
        return None if self.drafter is None else self.drafter.origin

    @property
    def reads(self) -> bool:
        """Return whether there is a drafter, and it must see the features of every position."""
        return self.drafter is not None and self.drafter.reads_features

    @property
    def reusable(self) -> int:
        """Number of cached tokens that need not be computed again, for the drafter neither."""
        return self.known if self.reads else len(self.cached)

    @property
    def prefill_chunk(self) -> int:
        """Number of prompt rows per pass; an answer is cancelled between two of these passes."""
        if self.target.rows_at_once is not None:
            return self.target.rows_at_once
        return PREFILL_CHUNK if self.on_cpu else PREFILL_CHUNK_CUDA

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise `FasteagleError` unless `prompt` can be answered with at least one token."""
        if not prompt:
            raise FasteagleError("the prompt is empty: give at least one token")
        if len(prompt) >= self.max_seq_len:
            raise FasteagleError(
                f"the prompt is too long: {len(prompt):,} tokens, max-seq-len {self.max_seq_len:,} "
                f"leaves room for {self.max_seq_len - 1:,}: shorten it or raise --max-seq-len"
            )
        low, high = min(prompt), max(prompt)
        vocab_size = self.model.config.vocab_size
        if low < 0 or high >= vocab_size:
            bad = shown(low if low < 0 else high)
            raise FasteagleError(
                f"token id {bad} is outside the vocabulary of {vocab_size:,}: use 0 .. "
                f"{vocab_size - 1:,}"
            )

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> Prefilled:
        """Fill the cache with exactly `prompt`; keep the features that the drafter has to be shown.

        Raises `EngineError` where memory is short.
        """
        for filled in self.prefill_parts(prompt):
            if filled is not None:
                return filled
        raise AssertionError("the last part is the result")

    def prefill_parts(self, prompt: Sequence[int]) -> Iterator[Prefilled | None]:
        """Yield None between the passes of `prefill`, and at last its result."""
        where = f" of a prompt of {len(prompt):,}"
        parts = self._prefill(prompt)
        while True:
            filled = unless_short(lambda: next(parts), lambda: self._out_of_memory(where))
            yield filled
            if filled is not None:
                return

    def _lost(self) -> EngineError:
        """Forget the conversation after a pass ran out of memory; return the error to raise."""
        error = self._out_of_memory()
        self.restart()
        return error

    def _out_of_memory(self, where: str = "") -> EngineError:
        """Return the error for memory that ran out after the tokens in `cached`."""
        freed = self.cache.rows.nbytes / self.cache.n_slots * 1024 / 2**30
        fix = self.backend.advised(head_config(self.drafter)) or (
            f"lower --max-seq-len (1,024 tokens fewer free {freed:.2f} GiB), or use --kv int8 or "
            "--precision int4"
        )
        return EngineError(f"out of memory at token {len(self.cached):,}{where}: {fix}")

    def _prefill(self, prompt: Sequence[int]) -> Iterator[Prefilled | None]:
        """Run `prefill_parts` without handling a lack of memory."""
        drafter, reads = self.drafter, self.reads
        same = common_prefix(self.cached, prompt)
        # The last row is always computed, for its logits.
        begin = n_cached = min(same, len(prompt) - 1)
        if reads:
            # The drafter's pairs are a feature and the token after it. The last token of the common
            # prefix may be followed by another one now, and only a pass computes its feature.
            begin = max(0, min(same - 1, self.known))
        if self.on_cpu:
            n_cached = begin  # our CPU kernels compute a row alike in any pass
        self._cut(begin)
        self.reserve(len(prompt))
        if drafter is not None and not begin:
            drafter.begin(prompt[0])
        for first, end in self._passes(begin, n_cached, len(prompt)):
            cached = self.cache.rows[:, :, first : min(end, n_cached)]  # none from `n_cached` on
            before = cached.clone()
            normed, aux_states = self._run(prompt[first:end], first, self.state.aux_layers)
            cached.copy_(before)
            read = normed if aux_states is None else aux_states
            self.cached.extend(prompt[first:end])
            if reads:
                self._keep(read if end < len(prompt) else read[:-1], prompt)
            if end < len(prompt):
                yield None
        yield Prefilled(normed[-1:], read[-1:], begin)

    def _passes(self, begin: int, n_cached: int, n: int) -> Iterator[tuple[int, int]]:
        """Yield the borders of the passes over rows `begin .. n`.

        Rows that are cached already are computed for their features only, in passes of their own:
        the others are cut alike with and without a drafter, so that their keys and values are
        equal bit for bit.
        """
        for first in range(begin, n_cached, HEAD_CHUNK):
            yield first, min(first + HEAD_CHUNK, n_cached)
        first = n_cached
        while first < n:
            few = n - first <= self.runner.few_rows
            end = min(first + (MAX_TREE_ROWS if few else self.prefill_chunk), n)
            yield first, end
            first = end

    def _keep(self, features: Tensor, text: Sequence[int]) -> None:
        """Keep features of the next positions, or show them; `text` has the token after each."""
        self.kept.append(features)
        self.known += len(features)
        if self.known - self.shown > MOST_KEPT:
            self._show_kept(text)

    def _keep_pending(self) -> None:
        """Keep the features of the pairs that are pending, all but the last."""
        state, n = self.state, len(self.cached) - self.known
        if self.reads and n > 1:
            features = state.features[: n - 1].clone()
            state.keep_last_pair(n)
            self._keep(features, self.cached)

    def _show_kept(self, text: Sequence[int]) -> None:
        """Show the draft head what is kept for it: a few takes nearly as long as many."""
        while self.drafter is not None and self.shown < self.known:
            end = min(self.shown + HEAD_CHUNK, self.known)
            kept, n = torch.cat(self.kept), end - self.shown
            tokens = torch.tensor(text[self.shown + 1 : end + 1], device=self.device)
            count = torch.tensor([n], device=self.device)
            seq_len = torch.tensor(end, device=self.device)
            self.shows += 1
            self.drafter.show(Committed(tokens, kept[:n], count), seq_len)
            # Not before: memory may be short for it.
            self.kept, self.shown = [kept[n:]] if end < self.known else [], end

    def _set_known(self, shown: int, kept: Sequence[Tensor] = ()) -> None:
        """Let the drafter know these positions of the text, as far as they are cached."""
        n = len(self.cached)
        self.shown = self.known = min(shown, n)
        self.kept = []
        if kept and shown < n:
            self.kept = [torch.cat([*kept])[: n - shown]]
            self.known += len(self.kept[0])

    def _cut(self, n: int) -> None:
        """Forget what comes after the first `n` tokens."""
        del self.cached[n:]
        self._set_known(self.shown, self.kept)

    def _run(
        self, ids: Sequence[int], begin: int, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run `ids` after `begin` cached rows; their slots are reserved already.

        Returns the LM head's input [T, D], and auxiliary hidden states [T, R * D] if there are any.
        """
        encoded = self.runner.replay_prompt(ids, begin, aux_layers)
        if encoded is None:
            tokens = torch.tensor(ids, device=self.device)
            rows = torch.arange(begin, begin + len(ids), device=self.device)
            visible = self._visible(begin, len(ids))
            encoded = self.target.encode(tokens, rows, rows, visible, self.cache, aux_layers)
        normed, aux_states = encoded
        return normed, None if aux_states is None else aux_states.to(normed.dtype)

    def _visible(self, begin: int, T: int) -> Visible:
        """Return what `T` rows of a prompt after `begin` cached rows see.

        A few rows on CUDA are a tree that is a chain: they run as fast as decoding does, with its
        bits. Other rows need a mask only after a window: over the keys up to their own, rounded
        up, where the cache has its full size. These three ways round differently: only `begin` and
        `T` choose between them, which no drafter changes.
        """
        window, n_slots = self.model.config.sliding_window, self.cache.n_slots
        if self.on_cpu:
            return causal_mask(begin, T, n_slots, window, self.device)
        if T > MAX_TREE_ROWS and (window is None or window >= begin + T):
            return PromptView(T, torch.arange(begin + T, device=self.device))
        if T > MAX_TREE_ROWS:
            n_keys = min(round_up(begin + T, KEY_BLOCK), n_slots)
            return causal_mask(begin, T, n_keys, window, self.device)
        return TreeView.of_chain(torch.tensor(begin, device=self.device), T, window)

    @torch.no_grad()
    def features(self, ids: Sequence[int], aux_layers: tuple[int, ...] = ()) -> Tensor:
        """Return auxiliary states and LM head's input of every token: [len(ids), (R + 1) * D].

        Used for training; forgets the conversation.
        """
        self.restart()
        self.reserve(len(ids))
        starts = range(0, len(ids), self.prefill_chunk)
        rows = []
        for at in starts:
            normed, aux_states = self._run(ids[at : at + self.prefill_chunk], at, aux_layers)
            rows.append(normed if aux_states is None else torch.cat((aux_states, normed), dim=-1))
        return torch.cat(rows)

    def restart(self) -> None:
        """Forget the conversation."""
        self._cut(0)

    def give_back(self) -> None:
        """Forget the conversation, and free the memory of caches that grow with the text."""
        self.restart()
        if self.fixed_slots is None:
            for cache in self.caches:
                cache.resize(1, exactly=True)

    @property
    def caches(self) -> list[KVCache]:
        """KV caches of the sequence: the target's, then the drafter's own."""
        return [self.cache, *(() if self.drafter is None else self.drafter.caches)]

    @property
    def slot_bytes(self) -> int:
        """Bytes that one token takes in these caches."""
        return sum(cache.rows[:, :, :1].nbytes for cache in self.caches)

    @torch.no_grad()
    def take(
        self, tokens: Sequence[int], shown: int, kept: Sequence[Tensor], rows: Sequence[Tensor]
    ) -> None:
        """Go on from other tokens, whose `rows` [2 L, G, n, E] of each cache are copied.

        The drafter that filled them had seen `shown` of the tokens; the features of the next ones
        were `kept`.
        """
        self.restart()
        self.reserve(len(tokens))
        for cache, own in zip(self.caches, rows, strict=True):
            cache.rows[:, :, : len(tokens)].copy_(own)
        self.cached[:] = tokens
        self._set_known(shown, kept)

    def _forget_everything(self) -> None:
        """Clear the caches: a NaN in a row past the text would spoil every later answer.

        Attention multiplies the rows that it does not see by zero, and zero times NaN is NaN.
        """
        self.restart()
        for cache in self.caches:
            cache.clear()

    def reserve(self, n_tokens: int, rows: int = 0, width: int = 0) -> None:
        """Make room for text, `rows` of a pass after it, and `width` pairs of the draft head.

        Caches grow with the text, unless the runner needs fixed addresses.
        """
        full = self.fixed_slots
        self.cache.resize(full or n_tokens + rows)
        if self.drafter is not None:
            self.drafter.reserve(full or n_tokens + width)

    @property
    def fixed_slots(self) -> int | None:
        """Number of slots that passes may use where caches do not grow with the text."""
        grows = self.on_cpu and not self.runner.fixed_addresses
        return None if grows else self.max_seq_len + MAX_TREE_ROWS


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading elements that `a` and `b` share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
