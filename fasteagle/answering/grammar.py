"""Grammars of answers: JSON, a JSON schema, a regular expression, a Lark grammar.

llguidance computes which tokens may come next. Copies of its matcher advance along every drafted
path, so that each row of a tree has the mask of plain decoding at that text. They are not rolled
back: after a branch with a mask of its own, llguidance 1.9 has wrong masks then.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasteagle.answering.grammar_check import first_reason, grammar_text, library, try_grammar
from fasteagle.errors import EngineError, FasteagleError
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.options import GrammarSpec
from fasteagle.quant import cpu_build

BITS = 32  # bits per word of llguidance's masks


@dataclasses.dataclass
class GrammarCompiler:
    """Compiler of grammars for one tokenizer; llguidance reads its vocabulary once (a second)."""

    tokenizer: ChatTokenizer
    vocab_size: int
    _known: Any = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def start(self, spec: GrammarSpec) -> GrammarMask:
        """Return the grammar before the first token.

        Raises `FasteagleError` with llguidance's reason. May be called from several threads.
        """
        special = None if spec.kind == "grammar" else self.tokenizer.special_in(spec.text)
        if special is not None:
            raise FasteagleError(
                f"{spec.kind}: {special!r} is a special token of this model, which ends or divides "
                "texts: no answer can contain it"
            )
        try_grammar(spec.kind, spec.text)
        with self._lock:
            if self._known is None:
                self._known = self.tokenizer.guidance(self.vocab_size)
        text = grammar_text(spec.kind, spec.text)
        matcher = library().LLMatcher(self._known, text, log_level=0)
        if reason := _early_failure(matcher, self.tokenizer.eos_ids):
            raise FasteagleError(f"{spec.kind}: {reason}")
        return GrammarMask(matcher, self.tokenizer.eos_ids)


def _early_failure(matcher: Any, eos_ids: frozenset[int]) -> str:
    """Return why a grammar fails before its first token or right after it, or an empty string.

    Some that are too large are accepted, and fail where the first token is consumed.
    """
    if not matcher.is_error():
        allowed = _unpacked(
            torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        )
        tokens = (t for t in allowed.nonzero().flatten().tolist() if t not in eos_ids)
        if not matcher.is_error() and (token := next(tokens, None)) is not None:
            matcher = matcher.deep_copy()
            matcher.consume_token(token)
    if not matcher.is_error():
        return ""
    return first_reason(matcher.get_error())


def _unpacked(words: Tensor) -> Tensor:
    """Return the bits of llguidance's masks [..., N] as booleans [..., N * BITS]."""
    places = torch.arange(BITS, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> places) & 1).bool().flatten(-2)


def _forbid(logits: Tensor, words: Tensor) -> Tensor:
    """Return logits [T, V], minus infinity where the bit in `words` [T, N] is 0.

    Our CPU kernels change them in place: torch's threads would wait for each other, which on a busy
    machine takes longer than a pass.
    """
    if cpu_build.serves(logits):
        logits = logits.contiguous()
        torch.ops.fasteagle_cpu.forbid(logits, words)
        return logits
    allowed = _unpacked(words.to(logits.device))[:, : logits.shape[1]]
    return logits.masked_fill(~allowed, float("-inf"))


class GrammarMask:
    """Grammar at the end of the text so far."""

    def __init__(self, matcher: Any, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._has_failed_rows = False  # in the last tree

    def apply(
        self, logits: Tensor, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]
    ) -> Tensor:
        """Return logits [T, V], minus infinity for tokens that may not follow a row of the tree.

        May change them in place. Rows that the grammar itself cannot reach allow all tokens: they
        are never accepted.
        """
        n_words = -(-logits.shape[1] // BITS)
        words = torch.full((len(tokens), n_words), -1, dtype=torch.int32)
        children: list[list[int]] = [[] for _ in tokens]
        for row in range(1, len(tokens)):
            if valid[row]:
                children[parents[row]].append(row)
        self._has_failed_rows = False
        self._fill(self._matcher, words, 0, tokens, children)
        _check(self._matcher)
        if not words[0].any():
            raise EngineError("grammar: it failed: no token may come next")
        return _forbid(logits, words)

    def _fill(
        self,
        matcher: Any,
        words: Tensor,
        row: int,
        tokens: Sequence[int],
        children: list[list[int]],
    ) -> None:
        """Fill the masks of `row`, where `matcher` is, and of all rows below it.

        Where llguidance fails, they allow all: `advance` raises if the text goes there.
        """
        mask = bytearray(matcher.compute_bitmask())  # little-endian: bit by bit, too
        if matcher.is_error():
            self._has_failed_rows = True
            return
        if not matcher.is_accepting():  # a text that looks like an end is none
            for token in self._eos_ids:
                mask[token // 8] &= ~(1 << token % 8)
        own = torch.frombuffer(mask, dtype=torch.int32)
        words[row] = 0
        n = min(len(own), words.shape[1])
        words[row, :n] = own[:n]
        for child in children[row]:
            token = tokens[child]
            if token in self._eos_ids or not mask[token // 8] >> token % 8 & 1:
                continue  # tokens below it are never used
            below = matcher.deep_copy()
            below.consume_token(token)
            self._fill(below, words, child, tokens, children)

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by tokens that were added to the text."""
        for token in tokens:
            if self._has_failed_rows:
                self._matcher.compute_bitmask()  # fails again
            if token not in self._eos_ids:
                self._matcher.consume_token(token)
        _check(self._matcher)


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise FasteagleError(f"grammar: it failed: {first_reason(matcher.get_error())}")
