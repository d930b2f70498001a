"""Processing of an answer's logits: bias, penalties, grammar, log-probabilities.

The result depends on a row's own path only.

Shapes: T tree rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fasteagle.answering.grammar import GrammarMask
from fasteagle.options import AnswerOptions, SamplingParams
from fasteagle.quant import cpu_build
from fasteagle.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token by the model's own distribution, and the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first


@dataclasses.dataclass(frozen=True)
class AnswerRequest:
    """Prompt of an answer and its options; `top_logprobs` None means no log-probabilities."""

    prompt: Sequence[int]
    params: SamplingParams
    answer: AnswerOptions
    eos_ids: frozenset[int]
    mask: GrammarMask | None = None
    logit_bias: Mapping[int, float] | None = None
    top_logprobs: int | None = None
    speculate: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class AnswerLogits:
    """Logits processor of one answer.

    `logit_bias` is added to the logits of these token ids. `presence_penalty` is subtracted for a
    token that the answer has already, `frequency_penalty` once for each time, as in OpenAI's API.
    `mask` forbids what a grammar does not allow, and with `top_logprobs` (0 or more) `logprobs`
    collects the log-probabilities of the answer's tokens by the model's own distribution, before
    bias, grammar, temperature and penalties.
    """

    def __init__(self, request: AnswerRequest) -> None:
        self._bias, self._mask, self._n_top = request.logit_bias, request.mask, request.top_logprobs
        self._presence, self._frequency = request.presence_penalty, request.frequency_penalty
        self._counts: Counter[int] = Counter()  # of its tokens, where a penalty needs them
        self._pass: tuple[Tensor, list[int], list[int], list[bool]] | None = None
        self.logprobs: list[TokenLogprob] = []

    @property
    def is_needed(self) -> bool:
        """Return whether this processor changes or records anything."""
        return self._changes or self._n_top is not None

    @property
    def _changes(self) -> bool:
        return bool(self._bias) or self._penalizes or self._mask is not None

    @property
    def _penalizes(self) -> bool:
        return bool(self._presence or self._frequency)

    def __call__(self, logits: Tensor, tree: DraftTree) -> Tensor:
        logits = logits.float()
        tokens, parents, valid = (part.tolist() for part in tree[:3])
        self._pass = (logits, tokens, parents, valid)
        changed = logits.clone() if self._n_top is not None and self._changes else logits
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
        paths: list[Counter[int]] = [Counter()]  # the root is in the answer, or ends the prompt
        for row in range(1, len(tokens)):
            paths.append(paths[parents[row]] + Counter([tokens[row]]))
        of_paths = []
        for row, path in zip(logits, paths, strict=True):
            counts = {token: n + self._counts[token] for token, n in path.items()}
            of_paths.append((row, *self._penalized(row, counts)))
        ids, values = self._penalized(logits, self._counts)
        logits[:, ids] = values
        for row, ids, values in of_paths:
            row[ids] = values

    def _penalized(self, logits: Tensor, counts: Mapping[int, int]) -> tuple[Tensor, Tensor]:
        """Return the tokens that have counts, and their logits [..., V] less the penalties."""
        ids = torch.tensor([*counts], dtype=torch.long, device=logits.device)
        times = logits.new_tensor([*counts.values()])
        return ids, logits[..., ids] - self._frequency * times - self._presence

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
            self.logprobs.append(_logprob(logits[row], token, self._n_top))
            row = _child(row, token, tokens, parents, valid)


def _logprob(logits: Tensor, token: int, n: int) -> TokenLogprob:
    """Return the log-probability of a token by logits [V], and the `n` likeliest tokens.

    On a CPU by our kernels where they are there, with one thread: see `grammar`.
    """
    if cpu_build.serves(logits):
        own, ids, values = torch.ops.fasteagle_cpu.likeliest(logits, token, n)
    else:
        logprobs = logits.log_softmax(-1)
        own, (values, ids) = float(logprobs[token]), logprobs.topk(n)
    return TokenLogprob(token, own, tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _child(
    row: int, token: int, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]
) -> int:
    """Return the child of `row` that carries `token`, or `row` past the end of a path."""
    for j in range(row + 1, len(tokens)):
        if parents[j] == row and tokens[j] == token and valid[j]:
            return j
    return row
