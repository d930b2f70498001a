"""Prompt in, tokens out: prefill, then one target pass per cycle, as a generator.

Reads in the order it runs: prefill -> verify -> accept -> commit. Knows token ids only; text,
stop strings and chat turns live in `stream` and `chat`.

Shapes: T rows, V vocabulary, S cache slots.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fasteagle.errors import FasteagleError
from fasteagle.model import KVCache, Output, Transformer, causal_mask
from fasteagle.options import SamplingParams
from fasteagle.sampling import BAD_ROW, draw

PREFILL_CHUNK = 256
MAX_TREE_ROWS = 64  # cache rows kept free behind the context for tokens not yet committed


@dataclasses.dataclass
class Stats:
    """What one answer took. Times in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the KV cache
    new_tokens: int = 0
    passes: int = 0  # target passes after prefill
    ttft: float = 0.0  # start to first token
    decode_seconds: float = 0.0  # first to last token
    finish: str = ""  # "eos", "length", "context", or "" while running or interrupted

    @property
    def tok_s(self) -> float:
        """Tokens per second after the first one."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def tau(self) -> float:
        """Tokens per target pass after prefill."""
        return (self.new_tokens - 1) / self.passes if self.passes else 1.0


class Engine:
    """One model, one sequence: the KV cache and the tokens it holds.

    `cached` are the tokens whose keys and values lie in slots `0 .. len(cached) - 1`; anything
    behind is never read. `plain_rows` is how many rows a plain pass computes: 2 where the kernels
    are faster at two rows than at one (see `choose_plain_rows`); the second row is thrown away.
    """

    def __init__(self, model: Transformer, max_seq_len: int, plain_rows: int = 1) -> None:
        self.model = model
        self.max_seq_len = max_seq_len
        self.plain_rows = plain_rows
        self.device = model.norm.weight.device
        self.dtype = model.norm.weight.dtype
        self.on_cpu = self.device.type == "cpu"
        n_slots = 0 if self.on_cpu else max_seq_len + MAX_TREE_ROWS
        self.cache = KVCache(model.config, max(n_slots, 1), self.dtype, self.device)
        self.cached: list[int] = []
        self.stats = Stats()

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], params: SamplingParams, max_new_tokens: int,
        eos_ids: frozenset[int] = frozenset(),
    ) -> Iterator[list[int]]:  # fmt: skip
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
        while True:
            token = self._read(root)
            now = time.perf_counter()
            if stats.new_tokens == 0:
                stats.ttft, first = now - start, now
            stats.new_tokens += 1
            stats.decode_seconds = now - first
            stats.finish = self._finish(token, max_new_tokens, eos_ids)
            yield [token]
            if stats.finish:
                return
            if seen is not None:
                seen[:, token] = True
            root = self._plain_cycle(token, root, params, seen)
            stats.passes += 1

    def _plain_cycle(
        self, token: int, root: Tensor, params: SamplingParams, seen: Tensor | None
    ) -> Tensor:
        """Verify a tree that is only the root; commit it; draw the next root [1]."""
        T = self.plain_rows
        tokens = torch.cat((root, root.new_zeros(T - 1)))
        depths = root.new_zeros(T)
        tree_mask = torch.eye(T, dtype=torch.bool, device=self.device)
        output = self.verify(tokens, depths, tree_mask)
        positions = root.new_full((1,), len(self.cached) + 1)
        root = draw(output.logits[:1], positions, params, seen)
        self.cached.append(token)
        return root

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> tuple[Tensor, int]:
        """Bring the cache to hold exactly `prompt`.

        Returns the features [1, D] of the last token, and how many tokens were there already.
        """
        # The last row is always computed: it yields the logits.
        kept = min(common_prefix(self.cached, prompt), len(prompt) - 1)
        del self.cached[kept:]
        self._reserve(len(prompt))
        for begin in range(kept, len(prompt), PREFILL_CHUNK):
            chunk = prompt[begin : begin + PREFILL_CHUNK]
            tokens = torch.tensor(chunk, device=self.device)
            rows = torch.arange(begin, begin + len(chunk), device=self.device)
            window = self.model.config.sliding_window
            mask = causal_mask(begin, len(chunk), self.cache.n_slots, window, self.device)
            features, _ = self.model.encode(tokens, rows, rows, mask, self.cache)
            self.cached.extend(chunk)
        return features[-1:], kept

    def verify(self, tokens: Tensor, depths: Tensor, tree_mask: Tensor) -> Output:
        """One target pass over T uncommitted rows behind the committed prefix.

        `depths` [T] count from the root (0); `tree_mask` [T, T] (bool): row j sees row i.
        """
        T, seq_len = tokens.shape[0], len(self.cached)
        self._reserve(seq_len + T)
        positions = seq_len + depths
        slots = seq_len + torch.arange(T, device=self.device)
        # Rows of one depth see the same committed keys: those of a causal row at their position.
        window = self.model.config.sliding_window
        keys = torch.arange(self.cache.n_slots, device=self.device)
        mask = (keys < seq_len).expand(T, -1)
        if window is not None:
            mask = mask & (keys > (positions - window).unsqueeze(1))
        mask = mask.index_copy(1, slots, tree_mask)
        return self.model(tokens, positions, slots, mask, self.cache)

    def _reserve(self, n_slots: int) -> None:
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

    def _read(self, root: Tensor) -> int:
        token = int(root)
        if token == BAD_ROW:
            dtype = str(self.dtype).removeprefix("torch.")
            other = "fp32" if self.dtype != torch.float16 else "bf16 or fp32"
            raise FasteagleError(
                f"the model's logits are not finite in {dtype} at position {len(self.cached)}: "
                f"try --dtype {other}, or fetch the weights again"
            )
        return token

    def _finish(self, token: int, max_new_tokens: int, eos_ids: frozenset[int]) -> str:
        if token in eos_ids:
            return "eos"
        if self.stats.new_tokens >= max_new_tokens:
            return "length"
        # The token just drawn takes slot len(cached); its successor needs one more.
        if len(self.cached) + 1 >= self.max_seq_len:
            return "context"
        return ""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that `a` and `b` share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


@torch.no_grad()
def choose_plain_rows(engine: Engine, budget: float = 0.5) -> int:
    """1 or 2, whichever makes a target pass faster here (some bf16 CPU kernels prefer two rows).

    Times both in turn for about `budget` seconds on rows behind the committed ones, which are
    never read: the conversation is untouched.
    """
    if not engine.on_cpu or len(engine.cached) + 2 > engine.max_seq_len:
        return 1
    times: dict[int, list[float]] = {1: [], 2: []}
    begin = time.perf_counter()
    while len(times[2]) < 4 or time.perf_counter() - begin < budget:
        for T in (1, 2):
            tokens = torch.zeros(T, dtype=torch.long)
            start = time.perf_counter()
            engine.verify(tokens, tokens, torch.eye(T, dtype=torch.bool))
            times[T].append(time.perf_counter() - start)
    return min(times, key=lambda T: statistics.median(times[T][1:]))  # the first one warms up
