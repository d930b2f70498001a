"""Training text and the target's features on it, computed once and kept in shards.

Shapes: n tokens of a conversation, D model dim.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fasteagle.errors import FasteagleError, note, with_progress
from fasteagle.generate import Engine
from fasteagle.loading.tensors import mapped_tensors, open_safetensors
from fasteagle.paths import replacing, require_free_space
from fasteagle.prompts import Conversation
from fasteagle.training.parallel import ALONE, Ranks

SHARD_TOKENS = 1 << 17


def without(conversations: Sequence[Conversation], held_out: Iterable[int]) -> list[Conversation]:
    """Return the conversations that are not held out."""
    left_out = set(held_out)
    return [c for i, c in enumerate(conversations) if i not in left_out]


def choose_held_out(conversations: Sequence[Conversation], n: int) -> list[int]:
    """Return indices of `n` conversations spread over the text, greedy ones where there are enough.

    On greedily written text the simulated acceptance is exact.
    """
    greedy = [i for i, c in enumerate(conversations) if c.greedy]
    pool = greedy if len(greedy) >= n else list(range(len(conversations)))
    return [pool[i * len(pool) // n] for i in range(n)]


def frequent_tokens(
    conversations: Sequence[Conversation],
    size: int,
    prior: Sequence[int] = (),
    among: Tensor | None = None,
) -> Tensor:
    """Return the `size` token ids most frequent in answers, ascending.

    Where the text has too few, those of `prior` follow, then the lowest ids. `among` [n] are the
    only ids there are, `size` or more of them, ascending; None: all.
    """
    counts: Counter[int] = Counter()
    for conversation in conversations:
        counts.update(conversation.ids[conversation.prompt_len :])
    seen = counts.keys() if among is None else counts.keys() & set(among.tolist())
    ranked = sorted(seen, key=lambda token: (-counts[token], token))[:size]
    chosen = set(ranked)
    lowest = range(size + len(chosen)) if among is None else among.tolist()
    rest = itertools.chain(prior, lowest)
    fill = (token for token in rest if token not in chosen)
    while len(chosen) < size:
        chosen.add(next(fill))
    return torch.tensor(sorted(chosen))


@dataclasses.dataclass
class Features:
    """Conversations with the target's features, which `read` returns for one of them."""

    conversations: Sequence[Conversation]
    n_aux: int  # auxiliary hidden states that an EAGLE-3 head reads
    read: Callable[[int], Tensor]

    def __len__(self) -> int:
        return len(self.conversations)

    @property
    def lengths(self) -> list[int]:
        return [len(c.ids) for c in self.conversations]

    def conversation(self, i: int) -> tuple[Tensor, Tensor]:
        """Return ids [n] and bf16 features [n, (n_aux + 1) * D] of one conversation.

        The last D columns are what the LM head reads, those before are the auxiliary hidden states.
        """
        return torch.tensor(self.conversations[i].ids), self.read(i)


def live_features(
    engine: Engine, conversations: Sequence[Conversation], aux_layers: tuple[int, ...] = ()
) -> Features:
    """Return features that are computed again for every request: no disk space, more time."""

    def read(i: int) -> Tensor:
        return _compute(engine, conversations[i], aux_layers)

    return Features(conversations, len(aux_layers), read)


def store_key(
    conversations: Sequence[Conversation], fingerprint: str, aux_layers: tuple[int, ...] = ()
) -> str:
    """Return the cache key of this text's features under this target."""
    layers = f" {aux_layers}" if aux_layers else ""
    digest = hashlib.sha256(f"{fingerprint}{layers}".encode())
    for c in conversations:
        digest.update(json.dumps([c.prompt_len, c.ids]).encode())
    return digest.hexdigest()[:24]


def cached_features(
    engine: Engine,
    conversations: Sequence[Conversation],
    folder: Path,
    aux_layers: tuple[int, ...] = (),
    ranks: Ranks = ALONE,
) -> Features:
    """Return the target's features of every token from shards in `folder`, computed if missing.

    A call continues where an earlier one was stopped. Of several processes each writes its part of
    the shards, and the first one reports that. Raises `FasteagleError` if the disk is too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = [(folder / name, group) for name, group in shards_of(conversations).items()]
    row_bytes = (len(aux_layers) + 1) * engine.model.config.dim * 2
    missing = sum(len(c.ids) for path, group in shards if not path.exists() for c in group)
    require_free_space(folder, missing * row_bytes, "caching features")
    own = ranks.share(shards)
    notify = note if ranks.is_first else lambda line: None
    for path, group in with_progress(own, "features of", "shards", notify):
        if not _is_whole(path):
            features = [_compute(engine, c, aux_layers) for c in group]
            with replacing(path) as temporary:
                save_file({"features": torch.cat(features)}, temporary)
    ranks.wait()
    parts: list[Tensor] = []  # of each conversation, memory-mapped
    for path, group in shards:
        parts += mapped_tensors(path)["features"].split([len(c.ids) for c in group])
    return Features(conversations, len(aux_layers), parts.__getitem__)


def _is_whole(shard: Path) -> bool:
    """Return whether a shard is there; report and remove a damaged one."""
    if not shard.exists():
        return False
    try:
        open_safetensors(shard)
    except FasteagleError as error:
        note(f"features in the cache are damaged and are computed again ({error})")
        shard.unlink()
    return shard.exists()


def _compute(engine: Engine, conversation: Conversation, aux_layers: tuple[int, ...]) -> Tensor:
    return engine.features(conversation.ids, aux_layers).to(torch.bfloat16).cpu()


def shards_of(conversations: Sequence[Conversation]) -> dict[str, list[Conversation]]:
    """Return the files of `cached_features` by name, with the conversations in each."""
    groups: list[list[Conversation]] = []
    size = SHARD_TOKENS
    for conversation in conversations:
        if size >= SHARD_TOKENS:
            groups.append([])
            size = 0
        groups[-1].append(conversation)
        size += len(conversation.ids)
    return {f"features-{i:05}.safetensors": group for i, group in enumerate(groups)}
