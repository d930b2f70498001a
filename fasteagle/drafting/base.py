"""Interface of drafters to the engine, and code that drafters share.

A drafter sees every committed position once (`extend`) and then proposes a tree (`propose`). It may
propose anything: verification accepts only tokens that the target itself samples. Both are tensor
code over the state of the cycle, so that they can be compiled and captured.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor

from fasteagle.drafting.company import Company
from fasteagle.drafting.ladder import Ranks
from fasteagle.drafting.lookup import Lookup
from fasteagle.drafting.policy import Outcome, Policy
from fasteagle.drafting.thresholds import Thresholds
from fasteagle.model import KVCache
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import AnyShape
from fasteagle.state import Accept, Committed, CycleSpec, DecodeState
from fasteagle.tree import DraftTree, Pool, fuse, rerank

START_HEAD_GAIN = 0.4  # tokens that a draft head's chain brings over its cost, before that is known


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Properties of a drafter that the tuner needs."""

    path: Path  # file of the measured costs
    ranks: Ranks
    head: str = ""  # digest of the draft head's files (`tensors.files_digest`)
    corpus: bool = False  # whether the lookup searches a corpus


def top_children(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return draft ids and log-probabilities [W, k] of each row's k best of logits [W, V]."""
    values, ids = logits.float().topk(k, dim=-1)
    return ids, values - logits.float().logsumexp(-1, keepdim=True)


class DraftOps(NamedTuple):
    """Operations of drafting that a backend may replace; the defaults are the core's.

    `head` runs a step of the draft head; None is `EagleHead.forward`.
    """

    top_children: Callable[[Tensor, int], tuple[Tensor, Tensor]] = top_children
    rerank: Callable[[Pool, Tensor, int], DraftTree] = rerank
    head: Callable[..., tuple[Tensor, Tensor]] | None = None
    look_up: Callable[[Lookup, Tensor, Tensor, int], tuple[Tensor, Tensor]] = Lookup.propose
    fuse: Callable[[Pool, int, int, Tensor, Tensor], Pool] = fuse


class Drafter:
    """Base class of drafters, which propose a tree for every cycle.

    A policy may change the shape of the tree while decoding. Without one (no costs measured yet, or
    fixed sizes) it stays the same.
    """

    name: str
    shape: AnyShape  # of the trees where no policy chooses another one
    reads_features: bool  # whether `extend` must see every committed position
    aux_layers: tuple[int, ...] = ()  # blocks whose input is its features; empty: final norm
    always_proposes = True  # whether every tree has a node besides the root
    lookup: Lookup | None = None  # of earlier matches in the text, where it looks these up
    tuning: Tuning | None = None  # set where the tree may be tuned
    policy: Policy | None = None  # chooses its trees while decoding, once costs are known
    company: Company | None = None  # chooses them instead, while other sequences share the passes
    fixed_thresholds = Thresholds()  # of gated chains without a policy
    ops = DraftOps()
    _origin: Self | None = None

    @property
    def origin(self) -> Self:
        """Return the drafter that this one is a copy of for another sequence, or itself."""
        return self if self._origin is None else self._origin

    def sibling(self) -> Self:
        """Return a copy for another sequence, with caches of its own."""
        other = self.apart()
        other._origin = self.origin
        return other

    def apart(self) -> Self:
        """Return a copy whose runs change neither this one's caches nor what it has learned."""
        other = copy.copy(self)
        if self.lookup is not None:
            other.lookup = self.lookup.apart()
        return other

    @property
    def may_skip_head(self) -> bool:
        """Return whether drafting may skip the draft head, decided in each cycle."""
        return False

    @property
    def caches(self) -> Sequence[KVCache]:
        """KV caches owned by the drafter."""
        return []

    @property
    def advanced(self) -> Sequence[Tensor]:
        """Tensors that a cycle changes, other than cache rows past the text."""
        return [] if self.lookup is None else self.lookup.tensors

    def run_by(self, ops: DraftOps) -> None:
        """Draft by these operations of the backend from now on."""
        self.ops = ops

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` tokens of text and a tree after them."""

    def begin(self, token: int) -> None:
        """Begin a text with `token`, the only token of it that is in no pair."""

    def extend(self, new: Committed, seq_len: Tensor) -> Any:
        """Observe the pairs of the last `new.count` positions; return the input of `propose`.

        `seq_len` (0-d) counts the committed tokens, those of `new` included.
        """
        return None

    def show(self, new: Committed, seq_len: Tensor) -> None:
        """Observe pairs as `extend` does, where nothing is to be proposed after them."""
        self.extend(new, seq_len)

    def propose(self, prediction: Any, state: DecodeState, spec: CycleSpec) -> DraftTree:
        """Return a tree of `spec.shape` under `state.root`."""
        raise NotImplementedError

    def accept_for(self, kind: SamplingMode) -> Accept | None:
        """Return `CycleSpec.accept` for this drafter's trees at a sampling mode."""
        return None

    # Decisions of the policy

    @property
    def _chooser(self) -> Policy | Company | None:
        return self.policy if self.company is None else self.company

    def next_shape(self) -> AnyShape | None:
        """Return the next cycle's shape; None is plain decoding, while drafting does not pay."""
        chooser = self._chooser
        return self.shape if chooser is None else chooser.next_shape

    def shapes(self) -> Sequence[AnyShape]:
        """Return all shapes that `next_shape` may return."""
        return [self.shape] if self.policy is None else self.policy.shapes

    @property
    def thresholds(self) -> Thresholds:
        """Path probabilities from which a gated chain continues."""
        return self.fixed_thresholds if self._chooser is None else self._chooser.thresholds

    @property
    def lookup_threshold(self) -> float:
        """Path probability from which a looked-up token of a gated chain is verified."""
        fixed = self.fixed_thresholds.verify[0]
        return fixed if self._chooser is None else self._chooser.lookup_threshold

    @property
    def head_gain(self) -> float | None:
        """Tokens that a looked-up chain must promise to skip the draft head; None: it pauses."""
        return START_HEAD_GAIN if self._chooser is None else self._chooser.head_gain

    def learn(self, shape: AnyShape | None, outcome: Outcome) -> None:
        """Observe a cycle with a tree of `shape`; None was a plain pass."""
        if self._chooser is not None:
            self._chooser.learn(shape, outcome)
