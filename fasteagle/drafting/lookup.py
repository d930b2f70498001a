"""N-gram lookup: earlier occurrences of the text's last tokens, and the tokens that followed.

It takes the latest of the longest earlier matches of the text's end, in the text itself or, if a
longer one is there, in a corpus of other documents. A table learns how often a copied token is
accepted, by match length and depth. Our CPU kernels (`look_up`) compute the same results, and share
the table.

This is tensor code of static shapes, and the host reads nothing. The text is searched from end to
end, a corpus through a sorted index.

Shapes: N slots of the text, M tokens of a corpus, L `LONGEST_MATCH`, R tokens copied from a match.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.shapes import MAX_DEPTH

NOTHING = -1  # in place of a token: there is none
OUTSIDE = -2  # in place of a token before the first one: nothing equals it
KEY_TOKENS, KEY_BITS = 3, 21  # keys of a corpus index: three ids fit into an int64
MAX_VOCAB = (1 << KEY_BITS) - 1
WINDOW = 256  # places of a corpus that are compared token by token
LONGEST_MATCH = 8  # most tokens that are compared
CLASSES = 8  # classes of match lengths and of depths: 1 .. 7, and all above
# How often a looked-up token is accepted, by the number of tokens that matched before it, from one
# on; accepted tokens of a proposal count as matched. LONG_RIGHT: by depth, after matches of eight
# or more, which are longer than eight on average.
RIGHT = (0.21, 0.54, 0.65, 0.71, 0.74, 0.81, 0.83, 0.85, 0.87, 0.87, 0.88, 0.89, 0.9, 0.9)
LONG_RIGHT = (0.95, 0.955, 0.96, 0.965, 0.97, 0.97, 0.975, 0.98)
PRIOR_TOKENS = 8.0  # weight of these rates, in tokens
MEMORY = 128.0  # largest weight of a cell of the table, in tokens
RAREST = 1e-3  # least probability, so that a token is tried again


class Match(NamedTuple):
    """Earlier occurrence of the text's end."""

    tokens: Tensor  # [R] tokens that followed, NOTHING past their end
    size: Tensor  # [1] int64, tokens that match; 0: no match


def suffix_of(text: Tensor, last: Tensor) -> Tensor:
    """Return the last tokens [L], the newest first; OUTSIDE before the text's beginning.

    `text` [N] holds the tokens, the last one at `last` (0-d).
    """
    at = last - torch.arange(LONGEST_MATCH, device=text.device)
    return torch.where(at >= 0, text[at.clamp(min=0)], OUTSIDE)


def find_in_text(text: Tensor, last: Tensor, reach: int) -> Match:
    """Return the best earlier match of the end of `text` [N], whose last token is at `last` (0-d).

    The tokens that followed end at `last`, and from there on they are repeated: a text in a loop is
    expected to stay in it.
    """
    N, device = text.shape[0], text.device
    suffix = suffix_of(text, last)
    padded = F.pad(text, (LONGEST_MATCH - 1, 0), value=NOTHING)
    at = torch.arange(N, device=device)  # where an earlier match may end
    alive = at < last
    sizes = torch.zeros_like(at)
    for back in range(LONGEST_MATCH):
        begin = LONGEST_MATCH - 1 - back
        alive = alive & (padded[begin : begin + N] == suffix[back])
        sizes = sizes + alive
    best, end = (sizes * N + at).max(0, keepdim=True)
    size = best // N
    period = torch.where(size > 0, last - end, 1)
    source = end + 1 + torch.arange(reach, device=device) % period
    return Match(torch.where(size > 0, text[source.clamp(max=N - 1)], NOTHING), size)


class Corpus:
    """Documents that answers may quote, as one tensor with an index of their token trigrams.

    A lookup is a binary search and a comparison of `WINDOW` places, however long the documents are.
    A corpus takes 24 bytes a token. Token ids from `vocab_size` on, which tokenizers of some models
    have, end a document: the target has no embeddings of them.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        device: torch.device | str,
        vocab_size: int = MAX_VOCAB,
    ) -> None:
        assert vocab_size <= MAX_VOCAB, "keys have no room for more"
        ids = [NOTHING] * KEY_TOKENS
        for document in documents:
            ids += [token if token < vocab_size else NOTHING for token in document]
            ids.append(NOTHING)
        self.tokens = torch.tensor(ids, device=device)  # [M]
        keys = torch.zeros_like(self.tokens)
        for back in range(KEY_TOKENS):
            keys = keys | (self.tokens.roll(back) + 1) << KEY_BITS * (KEY_TOKENS - 1 - back)
        self._keys, self._order = torch.sort(keys, stable=True)

    def __len__(self) -> int:
        return int((self.tokens >= 0).sum())

    @property
    def index(self) -> list[Tensor]:
        """Tokens, sorted keys, and the index of each key's last token: [M] int64 each."""
        return [self.tokens, self._keys, self._order]

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self.index)

    def find(self, text: Tensor, last: Tensor, reach: int) -> Match:
        """Return the best match of the end of `text`, as `find_in_text`, but without repetition.

        Only places that match in three tokens are compared, or else in two, or in one; of more than
        `WINDOW` places those with the highest token ids before the match.
        """
        device = text.device
        suffix = suffix_of(text, last)
        rank = self._end(suffix) - 1 - torch.arange(WINDOW, device=device)
        ends = self._order[rank.clamp(min=0)]  # [W]
        back = torch.arange(LONGEST_MATCH, device=device)
        before = self.tokens[(ends.unsqueeze(1) - back).clamp(min=0)]  # [W, L]
        sizes = (before == suffix).long().cumprod(1).sum(1)
        best = (sizes * len(self.tokens) + ends).argmax(0, keepdim=True)
        size = sizes[best]
        at = ends[best] + torch.arange(1, reach + 1, device=device)
        tokens = self.tokens[at.clamp(max=len(self.tokens) - 1)]
        inside = (tokens >= 0).long().cumprod(0).bool() & (size > 0)
        return Match(torch.where(inside, tokens, NOTHING), size)

    def _end(self, suffix: Tensor) -> Tensor:
        """Return the rank [1] after the last key that matches in three tokens, or else fewer."""
        shifts = KEY_BITS * torch.arange(KEY_TOKENS - 1, -1, -1, device=suffix.device)
        wanted = suffix[:KEY_TOKENS]
        low = ((wanted + 1) << shifts).cumsum(0).flip(0)  # three tokens, then two, then one
        last = low + ((1 << (KEY_BITS * torch.arange(KEY_TOKENS, device=suffix.device))) - 1)
        first = torch.searchsorted(self._keys, low)
        behind = torch.searchsorted(self._keys, last, right=True)
        whole = (wanted >= 0).long().cumprod(0).flip(0).bool()  # no match before the text begins
        some = (behind > first) & whole
        # Without any the first: nothing matches there, nor at lower ranks.
        return behind[some.long().argmax(0, keepdim=True)]


def prior() -> Tensor:
    """Return the initial table [2, CLASSES, CLASSES] of tokens tried and accepted.

    It is indexed by match size and depth, and was counted at every token of 500 greedy answers that
    the default model wrote for the draft head's training.
    """
    right = torch.tensor(
        [*(RIGHT[size : size + CLASSES] for size in range(CLASSES - 1)), LONG_RIGHT]
    )
    return PRIOR_TOKENS * torch.stack((torch.ones_like(right), right))


class Lookup:
    """Lookup in the text and a corpus, with a table of how often copied tokens are accepted.

    `table` [2, CLASSES, CLASSES] counts tokens that were tried and that were accepted, by match
    size and depth. `last` [4 + MAX_DEPTH] is the last proposal: the slot of its root, the root, the
    match's size, the number of its tokens, and its tokens.
    """

    def __init__(self, corpus: Corpus | None = None, device: torch.device | str = "cpu") -> None:
        self.corpus = corpus
        self.table = prior().to(device)
        self.last = torch.zeros(4 + MAX_DEPTH, dtype=torch.long, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that a cycle changes."""
        return [self.table, self.last]

    def apart(self) -> Self:
        """Return a copy of this lookup, which learns without changing this one."""
        other = copy.copy(self)
        other.table, other.last = self.table.clone(), self.last.clone()
        return other

    def find(self, text: Tensor, last: Tensor, reach: int) -> Match:
        """Return the best match of the end of `text` [N], whose last token is at `last` (0-d)."""
        here = find_in_text(text, last, reach)
        if self.corpus is None:
            return here
        there = self.corpus.find(text, last, reach)
        longer = there.size > here.size
        return Match(*(torch.where(longer, b, a) for a, b in zip(here, there, strict=True)))

    def propose(self, text: Tensor, last: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """Learn from the last proposal; return tokens [R] and their log-probabilities [R].

        A token's probability is that of being accepted after the token before it was accepted.
        """
        self._learn(text, last, reach)
        match = self.find(text, last, reach)
        is_token = match.tokens != NOTHING
        at = last.view(1)
        parts = (at, text.index_select(0, at), match.size, is_token.sum(0, keepdim=True))
        self.last[: 4 + reach] = torch.cat((*parts, match.tokens))
        depths = torch.arange(reach, device=text.device).clamp(max=CLASSES - 1)
        tried, right = self.table[:, (match.size - 1).clamp(0, CLASSES - 1), depths]
        logp = (right / tried).clamp(RAREST, 1).log()
        return match.tokens, torch.where(is_token, logp, float("-inf"))

    def _learn(self, text: Tensor, last: Tensor, reach: int) -> None:
        """Count the last proposal's tokens against the text, up to its first wrong token.

        A different token in the root's slot, or more new tokens than a cycle commits, mean that the
        text is another one: then nothing is counted.
        """
        at, root, size, n = self.last[:4].split(1)  # [1] each
        tokens = self.last[4:]
        depth = torch.arange(len(tokens), device=text.device)
        followed = at + 1 + depth
        same_text = text.index_select(0, at.clamp(max=len(text) - 1)) == root
        known = (depth < n) & (followed <= last) & same_text & (last <= at + reach + 1)
        is_right = known & (text[followed.clamp(max=len(text) - 1)] == tokens)
        before = torch.cat((is_right.new_ones(1), is_right[:-1].long().cumprod(0).bool()))
        counts = torch.stack((known & before, is_right & before)).to(self.table.dtype)  # [2, R]
        cell = (size - 1).clamp(0, CLASSES - 1)
        row = self.table[:, cell].squeeze(1).index_add(1, depth.clamp(max=CLASSES - 1), counts)
        row = row * (MEMORY / row[0]).clamp(max=1)
        self.table.index_copy_(1, cell, row.unsqueeze(1))
