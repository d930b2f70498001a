"""Sampling of several texts in one pass, with a model that handles one: for training data.

One pass computes a row of each text. Every text has a region of its own in one KV cache, and its
row sees that region alone. The prompt of each is run by the engine, by itself, and copied there.

Shapes: T texts in a pass, B regions, R slots of a region, V vocabulary, G KV heads, group query
heads of each, E head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fasteagle.compile.int8_cache import dense_rows
from fasteagle.device import available_bytes
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.model import KEY_BLOCK, KVCache, Target, round_up
from fasteagle.options import SamplingParams
from fasteagle.sampling import BAD_ROW, SamplingMode, SamplingTensors, draw


@dataclasses.dataclass
class _Text:
    """One text in its region of the cache; its last token is not in the cache yet."""

    key: int
    ids: list[int]
    prompt_len: int
    longest: int  # tokens that it may have, prompt included
    params: SamplingParams
    ended: bool = False


class BatchSampler:
    """Sampler of up to `size` texts at once; a text's tokens do not depend on the others.

    With quantized weights on a CPU the tokens are those of `Engine.generate` bit for bit. Elsewhere
    the rounding of products may differ, because its order depends on the number of rows.
    """

    def __init__(
        self,
        engine: Engine,
        size: int,
        eos_ids: frozenset[int],
        stop: Callable[[Sequence[int]], bool] = lambda new: False,
    ) -> None:
        """Make a sampler; `stop(new_tokens)` returns whether a text ends with its new tokens."""
        self._stop = stop
        self._engine, self._model, self._eos_ids = engine, engine.model, eos_ids
        self._texts: list[_Text | None] = [None] * size
        self._cache = engine.target.new_cache(size * KEY_BLOCK)

    @property
    def has_room(self) -> bool:
        """Return whether another text may be added."""
        return None in self._texts

    @property
    def is_empty(self) -> bool:
        return not any(self._texts)

    @torch.no_grad()
    def add(
        self, key: int, prompt: Sequence[int], params: SamplingParams, max_new_tokens: int
    ) -> None:
        """Begin to continue `prompt`, which must leave room for a token; `step` names it `key`."""
        limit = self._engine.max_seq_len
        assert 0 < len(prompt) < limit, "the caller leaves out prompts that do not fit"
        region = self._texts.index(None)
        feature, *_ = self._engine.prefill(prompt)
        self._reserve(len(prompt) + 1)
        held = self._engine.cache.rows[:, :, : len(prompt)]
        self._by_region(self._cache)[:, :, region, : len(prompt)] = held
        longest = min(len(prompt) + max_new_tokens, limit)
        text = _Text(key, list(prompt), len(prompt), longest, params)
        self._texts[region] = text
        self._extend([text], self._model.lm_head(feature))

    @torch.no_grad()
    def step(self) -> list[tuple[int, list[int]]]:
        """Run one pass over unfinished texts; return key and new tokens of the finished ones."""
        active = [(i, text) for i, text in enumerate(self._texts) if text and not text.ended]
        if active:
            texts = [text for _, text in active]
            self._reserve(max(len(text.ids) for text in texts))
            self._extend(texts, self._logits([i for i, _ in active], texts))
        done: list[tuple[int, list[int]]] = []
        for i, text in enumerate(self._texts):
            if text is not None and text.ended:
                done.append((text.key, text.ids[text.prompt_len :]))
                self._texts[i] = None
        return done

    def _extend(self, texts: Sequence[_Text], logits: Tensor) -> None:
        """Sample the next token of each of `texts` from its row of `logits`."""
        alike: dict[SamplingParams, list[int]] = {}  # rows that differ in the seed alone
        for row, text in enumerate(texts):
            alike.setdefault(dataclasses.replace(text.params, seed=0), []).append(row)
        for params, rows in alike.items():
            drawn = self._draw(params, [texts[row] for row in rows], logits[rows])
            for row, token in zip(rows, drawn, strict=True):
                text = texts[row]
                if token == BAD_ROW:
                    raise FasteagleError(
                        f"the model's logits are not finite at position {len(text.ids)}: "
                        "try --precision fp32, or fetch the weights again"
                    )
                text.ids.append(token)
                full = token in self._eos_ids or len(text.ids) >= text.longest
                text.ended = full or self._stop(text.ids[text.prompt_len :])

    def _draw(self, params: SamplingParams, texts: Sequence[_Text], logits: Tensor) -> list[int]:
        """Return a token for each of `texts`, all sampled by `params` but for the seed."""
        device = logits.device
        sampling = SamplingTensors.of(params, device)
        sampling.seed = torch.tensor([text.params.seed for text in texts], device=device)
        positions = torch.tensor([len(text.ids) for text in texts], device=device)
        kind = SamplingMode.of(params, self._model.config.vocab_size)
        return draw(logits, positions, kind, sampling).tolist()

    def _logits(self, regions: list[int], texts: Sequence[_Text]) -> Tensor:
        """Return logits [T, V] after each text's last token."""
        device, R = self._engine.device, self._region_slots
        tokens = torch.tensor([text.ids[-1] for text in texts], device=device)
        positions = torch.tensor([len(text.ids) - 1 for text in texts], device=device)
        own = torch.tensor(regions, device=device)
        mask = self._visible(positions)
        target = self._engine.target
        if self._engine.backend.name == "cpu":
            # The kernels leave out what a row does not see, and take masks over all slots.
            wide = mask.new_zeros(len(texts), len(self._texts), R)
            wide[torch.arange(len(texts)), own] = mask
            mask = wide.flatten(1)
        else:
            is_full = len(regions) == len(self._texts)
            target = attending_by_region(target, slice(None) if is_full else own)
        features, _ = target.encode(tokens, positions, own * R + positions, mask, self._cache)
        return self._model.lm_head(features)

    def _visible(self, positions: Tensor) -> Tensor:
        """Return the slots [T, R] of its region that a row sees: past and itself, or a window."""
        slot = torch.arange(self._region_slots, device=positions.device)
        last = positions.unsqueeze(1)
        window = self._model.config.sliding_window
        mask = slot <= last
        return mask if window is None else mask & (slot > last - window)

    @property
    def _region_slots(self) -> int:
        return self._cache.n_slots // len(self._texts)

    def _by_region(self, cache: KVCache) -> Tensor:
        """Return the cache's rows as [2 L, G, B, R, E]."""
        return cache.rows.unflatten(2, (len(self._texts), -1))

    def _reserve(self, n_tokens: int) -> None:
        """Make every region hold `n_tokens`, in steps of `KEY_BLOCK`."""
        old, R = self._cache, self._region_slots
        if n_tokens <= R:
            return
        engine, n_slots = self._engine, len(self._texts) * round_up(n_tokens, KEY_BLOCK)
        needed = old.rows[:, :, :1].numel() * old.rows.element_size() * n_slots
        free = available_bytes(engine.device)
        if free is not None and needed > free:
            raise FasteagleError(
                f"{len(self._texts)} texts of {n_tokens:,} tokens need {needed / 2**30:.1f} GiB of "
                f"KV cache, {free / 2**30:.1f} GiB free: lower --batch or --max-new-tokens"
            )
        self._cache = engine.target.new_cache(n_slots)
        self._by_region(self._cache)[:, :, :, :R] = self._by_region(old)


def attending_by_region(target: Target, regions: Tensor | slice) -> Target:
    """Return `target` with row t of a pass attending to region `regions[t]` under a mask [T, R]."""
    attend = functools.partial(attend_by_region, regions=regions)
    return dataclasses.replace(target, ops=target.ops._replace(attend=attend, run_blocks=None))


def attend_by_region(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor, regions: Tensor | slice
) -> Tensor:
    """Return `model.attend` of q [G, group * T, E] over [G, B * R, E], each row in its region."""
    G, _, E = q.shape
    T, R = mask.shape
    q = q.view(G, -1, T, E).transpose(1, 2)  # [G, T, group, E]
    # [G, T, R, E]
    k, v = (
        dense_rows(cache.view(G, -1, R, cache.shape[2])[:, regions], q.dtype)
        for cache in (k_cache, v_cache)
    )
    scores = (q @ k.transpose(2, 3)).float() / math.sqrt(E)
    weights = torch.softmax(scores.masked_fill(~mask.unsqueeze(1), float("-inf")), -1)
    return (weights.to(v.dtype) @ v).transpose(1, 2).reshape(G, -1, E)
