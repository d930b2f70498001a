"""Processing of the target's logits before sampling: bias, penalties, grammar, log-probabilities.

The result depends on a row's own path only, so the tokens with and without speculation are equal:
a row of the tree is processed as plain decoding would process the text that the row stands for.

Shapes: T tree rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fasteagle.tree import DraftTree


class LogitsProcessor(Protocol):
    """Processor of the logits of every pass; row 0 of the tree is the last token of the text."""

    def __call__(self, logits: Tensor, tree: DraftTree) -> Tensor:
        """Return the logits [T, V] to sample from; may change the given ones in place."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Observe the committed tokens of the last pass, in the order of the text."""


class TokenMask(Protocol):
    """Grammar at the end of the text so far."""

    def apply(
        self, logits: Tensor, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]
    ) -> Tensor:
        """Return logits [T, V], minus infinity for tokens that may not follow a row of the tree.

        May change them in place. Rows that the grammar itself cannot reach allow all tokens: they
        are never accepted.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by tokens that were added to the text."""


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token by the model's own distribution, and the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first


class AnswerLogits:
    """Logits processor of one answer.

    `bias` is added to the logits of these token ids. `presence_penalty` is subtracted for a token
    that the answer has already, `frequency_penalty` once for each time, as in OpenAI's API. `mask`
    forbids what a grammar does not allow, and with `n_top` (0 or more) `logprobs` collects the
    log-probabilities of the answer's tokens by the model's own distribution, before bias, grammar,
    temperature and penalties.
    """

    def __init__(
        self,
        bias: Mapping[int, float] | None = None,
        mask: TokenMask | None = None,
        n_top: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
    ) -> None:
        self._bias = dict(bias or {})
        self._presence, self._frequency = presence_penalty, frequency_penalty
        self._counts: Counter[int] = Counter()  # of its tokens, where a penalty needs them
        self._mask = mask
        self._n_top = n_top
        self._pass: tuple[Tensor, list[int], list[int], list[bool]] | None = None
        self.logprobs: list[TokenLogprob] = []

    @property
    def is_needed(self) -> bool:
        """Return whether this processor changes or records anything."""
        changes = bool(self._bias) or self._penalizes or self._mask is not None
        return changes or self._n_top is not None

    @property
    def _penalizes(self) -> bool:
        return bool(self._presence or self._frequency)

    def __call__(self, logits: Tensor, tree: DraftTree) -> Tensor:
        logits = logits.float()
        tokens, parents, valid = (part.tolist() for part in tree[:3])
        self._pass = (logits, tokens, parents, valid)
        changed = logits if self._n_top is None else logits.clone()
        if self._bias:
            ids = torch.tensor(list(self._bias), device=logits.device)
            changed[:, ids] += logits.new_tensor(list(self._bias.values()))
        if self._penalizes:
            self._penalize(changed, tokens, parents)
        if self._mask is not None:
            changed = self._mask.apply(changed, tokens, parents, valid)
        return changed

    def _penalize(self, logits: Tensor, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Subtract the penalties, by how often a token is in the answer up to a row."""
        counts: list[Counter[int]] = [self._counts]  # the root is in it already, or in the prompt
        for row in range(1, len(tokens)):
            counts.append(counts[parents[row]] + Counter([tokens[row]]))
        for own, of_row in zip(logits, counts, strict=True):
            ids = torch.tensor([*of_row], dtype=torch.long, device=logits.device)
            times = logits.new_tensor([*of_row.values()])
            own[ids] = own[ids] - self._frequency * times - self._presence

    def accept(self, tokens: Sequence[int]) -> None:
        if self._penalizes:
            self._counts.update(tokens)
        if self._n_top is not None:
            self._keep_logprobs(tokens)
        if self._mask is not None:
            self._mask.advance(tokens)
        self._pass = None

    def _keep_logprobs(self, emitted: Sequence[int]) -> None:
        assert self._pass is not None and self._n_top is not None, "accept follows a pass"
        logits, tokens, parents, valid = self._pass
        row = 0
        for token in emitted:
            logprobs = logits[row].log_softmax(-1)
            best = logprobs.topk(self._n_top) if self._n_top else None
            top = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best else ()
            self.logprobs.append(TokenLogprob(token, float(logprobs[token]), tuple(top)))
            row = _child(row, token, tokens, parents, valid)


def _child(
    row: int, token: int, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]
) -> int:
    """Return the child of `row` that carries `token`, or `row` past the end of a path."""
    for j in range(row + 1, len(tokens)):
        if parents[j] == row and tokens[j] == token and valid[j]:
            return j
    return row
