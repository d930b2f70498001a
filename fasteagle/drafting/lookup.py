"""N-gram lookup: where the text's last few tokens stood before, and what followed there.

Tensor code of static shapes, nothing is read on the host. The text is searched from end to end, a
corpus of other documents through a sorted index.

Shapes: N slots of the text, M tokens of a corpus, L longest match, P places, R tokens read at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.shapes import MAX_REACH

NOTHING = -1  # in place of a token: here is none
OUTSIDE = -2  # in place of a wanted token before the first one: nothing equals it
KEY_TOKENS, KEY_BITS = 3, 21  # of a corpus index: three ids fit into an int64
WINDOW = 256  # places of a corpus that are compared token by token


class Matches(NamedTuple):
    """Earlier places, the longest match first, among equals the latest."""

    tokens: Tensor  # [P, R] what followed, NOTHING behind its end
    sizes: Tensor  # [P] int64, tokens that match; 0: no place


def suffix_of(text: Tensor, last: Tensor, longest: int) -> Tensor:
    """The last tokens [L], the newest first; OUTSIDE before the beginning.

    `text` [N] holds the tokens, the last one at `last` (0-d).
    """
    at = last - torch.arange(longest, device=text.device)
    return torch.where(at >= 0, text[at.clamp(min=0)], OUTSIDE)


def find_in_text(
    text: Tensor, last: Tensor, places: int, reach: int, longest: int, shortest: int = 1
) -> Matches:
    """The best earlier places where the end of `text` [N] stood; its last token is at `last` (0-d).

    What followed ends where the text does. From there on it is repeated: a text that goes round in
    circles is expected to go on doing so.
    """
    N, device = text.shape[0], text.device
    suffix = suffix_of(text, last, longest)
    padded = F.pad(text, (longest - 1, 0), value=NOTHING)
    at = torch.arange(N, device=device)  # where an earlier match may end
    alive = at < last
    sizes = torch.zeros_like(at)
    for back in range(longest):
        begin = longest - 1 - back
        alive = alive & (padded[begin : begin + N] == suffix[back])
        sizes = sizes + alive
    score = torch.where(sizes >= shortest, sizes * N + at, -1)
    best, ends = score.topk(min(places, N))
    found = best >= 0
    period = torch.where(found, last - ends, 1).unsqueeze(1)
    source = ends.unsqueeze(1) + 1 + torch.arange(reach, device=device) % period
    tokens = torch.where(found.unsqueeze(1), text[source.clamp(max=N - 1)], NOTHING)
    return Matches(tokens, torch.where(found, best // N, 0))


class Corpus:
    """Documents that may be quoted, as one tensor with an index of their three-token sequences.

    A lookup is a binary search and a comparison of `WINDOW` places, however long the documents are.
    Takes 24 bytes a token.
    """

    def __init__(self, documents: Sequence[Sequence[int]], device: torch.device | str) -> None:
        ids = [NOTHING] * KEY_TOKENS
        for document in documents:
            ids += [*document, NOTHING]
        ids += [NOTHING] * MAX_REACH
        assert max(ids) + 1 < 1 << KEY_BITS, "a key has room for vocabularies of two million"
        self.tokens = torch.tensor(ids, device=device)  # [M]
        keys = torch.zeros_like(self.tokens)
        for back in range(KEY_TOKENS):
            keys = keys | (self.tokens.roll(back) + 1) << KEY_BITS * (KEY_TOKENS - 1 - back)
        self._keys, self._order = torch.sort(keys, stable=True)

    def __len__(self) -> int:
        return int((self.tokens >= 0).sum())

    @property
    def index(self) -> list[Tensor]:
        """[M] int64 each: the tokens, the sorted keys, and where each key's last token stands."""
        return [self.tokens, self._keys, self._order]

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self.index)

    def find(
        self, text: Tensor, last: Tensor, places: int, reach: int, longest: int, shortest: int = 1
    ) -> Matches:
        """As `find_in_text`, for the end of `text`; nothing is repeated.

        Only places that agree in three tokens are compared, or else in two, or in one; of more than
        `WINDOW` of them those with the highest ids before the match.
        """
        device = text.device
        suffix = suffix_of(text, last, longest)
        first, behind = self._ranges(suffix)
        rank = behind - 1 - torch.arange(WINDOW, device=device)
        there = rank >= first
        ends = self._order[rank.clamp(min=0)]  # [W]
        back = torch.arange(longest, device=device)
        before = self.tokens[(ends.unsqueeze(1) - back).clamp(min=0)]  # [W, L]
        sizes = (before == suffix).long().cumprod(1).sum(1)
        sizes = torch.where(there & (sizes >= shortest), sizes, 0)
        best = torch.sort(sizes * len(self.tokens) + ends, descending=True).indices[:places]
        offsets = torch.arange(1, reach + 1, device=device)
        at = (ends[best].unsqueeze(1) + offsets).clamp(max=len(self.tokens) - 1)
        tokens = self.tokens[at]
        inside = (tokens >= 0).long().cumprod(1).bool() & (sizes[best] > 0).unsqueeze(1)
        return Matches(torch.where(inside, tokens, NOTHING), sizes[best])

    def _ranges(self, suffix: Tensor) -> tuple[Tensor, Tensor]:
        """First and behind-last rank [1] of the keys that agree in three tokens, or two, or one."""
        shifts = KEY_BITS * torch.arange(KEY_TOKENS - 1, -1, -1, device=suffix.device)
        wanted = F.pad(suffix[:KEY_TOKENS], (0, max(0, KEY_TOKENS - len(suffix))), value=OUTSIDE)
        parts = (wanted.clamp(min=NOTHING) + 1) << shifts
        low = parts.cumsum(0).flip(0)  # three tokens, then two, then one
        last = low + ((1 << (KEY_BITS * torch.arange(KEY_TOKENS, device=suffix.device))) - 1)
        first = torch.searchsorted(self._keys, low)
        behind = torch.searchsorted(self._keys, last, right=True)
        whole = (wanted >= 0).long().cumprod(0).flip(0).bool()  # no token is wanted before the text
        some = (behind > first) & whole
        chosen = some.long().argmax(0, keepdim=True)  # of none the first: sizes will be 0
        behind = torch.where(some, behind, first)
        return first[chosen], behind[chosen]


def joined(first: Matches, second: Matches) -> Matches:
    """The places of both, the longest match first; among equals those of `first`."""
    sizes = torch.cat((first.sizes, second.sizes))
    order = torch.sort(sizes, descending=True, stable=True).indices
    return Matches(torch.cat((first.tokens, second.tokens))[order], sizes[order])


class Lookup:
    """How far and where to look: the text, and a corpus if there is one.

    `places` earlier places are taken from each.
    """

    def __init__(
        self, places: int = 4, longest: int = 8, shortest: int = 1, corpus: Corpus | None = None
    ) -> None:
        self.longest, self.shortest, self.corpus = longest, shortest, corpus
        self._places = places

    @property
    def places(self) -> int:
        """P of what is found."""
        return self._places if self.corpus is None else 2 * self._places

    def find(self, text: Tensor, last: Tensor, reach: int) -> Matches:
        """What followed earlier places of the end of `text` [N], which is at `last` (0-d)."""
        sizes = (self._places, reach, self.longest, self.shortest)
        found = find_in_text(text, last, *sizes)
        if self.corpus is None:
            return found
        return joined(found, self.corpus.find(text, last, *sizes))
