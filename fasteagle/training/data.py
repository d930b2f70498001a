"""Training text and the target's features on it, computed once and kept in shards.

A conversation is a line of JSON with `ids` (token ids of all of it) and `prompt_len` (where the
answer begins). Shapes: N tokens of all conversations end to end, D model dim.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fasteagle.generate import Engine
from fasteagle.paths import replacing, require_free_space
from fasteagle.prompts import Conversation
from fasteagle.training.parallel import Ranks

SHARD_TOKENS = 1 << 17


def choose_held_out(conversations: Sequence[Conversation], n: int) -> list[int]:
    """Return indices of `n` conversations spread over the text, greedy ones where there are enough.

    On greedily written text the simulated acceptance is exact.
    """
    greedy = [i for i, c in enumerate(conversations) if c.greedy]
    pool = greedy if len(greedy) >= n else list(range(len(conversations)))
    return [pool[i * len(pool) // n] for i in range(n)]


def frequent_tokens(
    conversations: Sequence[Conversation], size: int, prior: Sequence[int] = ()
) -> Tensor:
    """Return the `size` token ids most frequent in answers, ascending.

    Where the text has too few, those of `prior` follow, then the lowest ids.
    """
    counts: Counter[int] = Counter()
    for conversation in conversations:
        counts.update(conversation.ids[conversation.prompt_len :])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    chosen = set(ranked)
    rest = itertools.chain(prior, range(size + len(chosen)))
    fill = (token for token in rest if token not in chosen)
    while len(chosen) < size:
        chosen.add(next(fill))
    return torch.tensor(sorted(chosen))


class Features(Protocol):
    """Conversations with the target's features, from any source."""

    lengths: list[int]
    prompt_lens: list[int]
    n_aux: int  # auxiliary hidden states that an EAGLE-3 head reads

    def __len__(self) -> int: ...

    def conversation(self, i: int) -> tuple[Tensor, Tensor]:
        """Return ids [n] and bf16 features [n, (n_aux + 1) * D] of one conversation.

        The last D columns are what the LM head reads, those before are the auxiliary hidden states.
        """


class LiveFeatures:
    """Features computed again for every request: no disk space, more time."""

    def __init__(
        self,
        engine: Engine,
        conversations: Sequence[Conversation],
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self._engine, self._conversations = engine, conversations
        self._aux_layers, self.n_aux = aux_layers, len(aux_layers)
        self.lengths = [len(c.ids) for c in conversations]
        self.prompt_lens = [c.prompt_len for c in conversations]

    def __len__(self) -> int:
        return len(self.lengths)

    def conversation(self, i: int) -> tuple[Tensor, Tensor]:
        ids = self._conversations[i].ids
        features = self._engine.features(ids, self._aux_layers)
        return torch.tensor(ids), features.to(torch.bfloat16).cpu()


class FeatureStore:
    """Ids [N] and features [N, D] of conversations, memory-mapped from safetensors shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = json.loads((folder / "index.json").read_text())
        shards = [load_file(folder / name) for name in index["shards"]]
        self.ids = torch.cat([shard["ids"] for shard in shards]).long()
        self._features = [shard["features"] for shard in shards]
        self._shard_of = index["shard_of"]  # shard and row of each conversation's first token
        self.n_aux: int = index.get("n_taps", 0)
        self.lengths: list[int] = index["lengths"]
        self.prompt_lens: list[int] = index["prompt_lens"]
        self._starts = [0]
        for length in self.lengths:
            self._starts.append(self._starts[-1] + length)

    def __len__(self) -> int:
        return len(self.lengths)

    def conversation(self, i: int) -> tuple[Tensor, Tensor]:
        shard, row = self._shard_of[i]
        n, start = self.lengths[i], self._starts[i]
        return self.ids[start : start + n], self._features[shard][row : row + n]


def store_key(
    conversations: Sequence[Conversation], fingerprint: str, aux_layers: tuple[int, ...] = ()
) -> str:
    """Return the cache key of this text's features under this target."""
    layers = f" {aux_layers}" if aux_layers else ""
    digest = hashlib.sha256(f"{fingerprint}{layers}".encode())
    for c in conversations:
        digest.update(json.dumps([c.prompt_len, c.ids]).encode())
    return digest.hexdigest()[:24]


def compute_features(
    engine: Engine,
    conversations: Sequence[Conversation],
    folder: Path,
    progress: Callable[[int], None] = lambda n: None,
    aux_layers: tuple[int, ...] = (),
    ranks: Ranks | None = None,
) -> FeatureStore:
    """Compute the target's features of every token in shards, and return them; see `Features`.

    Finished shards are kept: a call continues where an earlier one was stopped. Of several
    processes each writes its part of the shards, and `progress` reports that. Raises
    `FasteagleError` if the disk is too small.
    """
    ranks = ranks or Ranks()
    folder.mkdir(parents=True, exist_ok=True)
    index_path = folder / "index.json"
    if index_path.exists():
        return FeatureStore(folder)
    total = sum(len(c.ids) for c in conversations)
    row_bytes = (len(aux_layers) + 1) * engine.model.config.dim * 2 + 4
    done = len(list(folder.glob("features-*.safetensors"))) * SHARD_TOKENS
    require_free_space(folder, max(0, total - done) * row_bytes, "caching features")
    groups = list(_shards(conversations))
    paths = [folder / f"features-{shard:05}.safetensors" for shard in range(len(groups))]
    for shard in ranks.share(list(range(len(groups)))):
        if not paths[shard].exists():
            _write_shard(engine, groups[shard], paths[shard], aux_layers)
        progress(sum(len(c.ids) for c in groups[shard]))
    ranks.wait()
    if ranks.is_first:
        index = {
            "shards": [path.name for path in paths],
            "shard_of": [place for i, group in enumerate(groups) for place in _places(i, group)],
            "lengths": [len(c.ids) for c in conversations],
            "prompt_lens": [c.prompt_len for c in conversations],
            "n_taps": len(aux_layers),
        }
        with replacing(index_path) as temporary:
            temporary.write_text(json.dumps(index))
    ranks.wait()
    return FeatureStore(folder)


def _places(shard: int, group: Sequence[Conversation]) -> Iterator[tuple[int, int]]:
    """Yield the shard and the first row of each conversation of `group`."""
    row = 0
    for conversation in group:
        yield shard, row
        row += len(conversation.ids)


def _shards(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    group: list[Conversation] = []
    size = 0
    for conversation in conversations:
        group.append(conversation)
        size += len(conversation.ids)
        if size >= SHARD_TOKENS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_shard(
    engine: Engine, group: Sequence[Conversation], path: Path, aux_layers: tuple[int, ...]
) -> None:
    features = [engine.features(c.ids, aux_layers).to(torch.bfloat16).cpu() for c in group]
    ids = torch.tensor([i for c in group for i in c.ids], dtype=torch.int32)
    with replacing(path) as temporary:
        save_file({"ids": ids, "features": torch.cat(features)}, temporary)
