"""What the engine needs of a drafter, and what drafters share.

A drafter sees every committed position once (`extend`) and then proposes a tree (`propose`). It may
propose anything: verification keeps only what the target itself would have said. Both are tensor
code over the state of the cycle, so that they can be compiled and captured.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from fasteagle.drafting.ladder import Ranks
from fasteagle.drafting.policy import Outcome, Policy, Thresholds
from fasteagle.model import KVCache
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import AnyShape
from fasteagle.state import Accept, Committed, CycleSpec, DecodeState
from fasteagle.tree import DraftTree

START_HEAD_GAIN = 0.4  # tokens that a chain of the head brings over its cost, before any is known


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What the tuner must know of a drafter."""

    path: Path  # of the measured costs
    ranks: Ranks
    head: str = ""  # the files of its draft head (`tensors.files_digest`)
    corpus: bool = False  # whether its lookup searches one


class Drafter(Protocol):
    """Proposes trees."""

    name: str
    tuning: Tuning | None  # set where the tree may be tuned
    reads_features: bool  # whether `extend` must see every committed position
    tap_layers: tuple[int, ...]  # whose taps are its features; empty: those of the final norm
    always_proposes: bool  # whether every tree has a node besides the root

    policy: Policy | None  # what chooses its trees while decoding, once costs are known
    looks_up: bool  # whether it searches the text for earlier places

    @property
    def may_skip_head(self) -> bool:
        """Whether drafting decides by itself, in each cycle, to leave the draft head out."""

    @property
    def shape(self) -> AnyShape:
        """Shape of its trees where no policy chooses another one."""

    @property
    def caches(self) -> Sequence[KVCache]:
        """Of its own."""

    @property
    def advanced(self) -> Sequence[Tensor]:
        """What a cycle changes, but for rows of caches behind the text."""

    def next_shape(self) -> AnyShape | None:
        """Of the next cycle's tree; None for plain decoding, because drafting does not pay now."""

    def shapes(self) -> Sequence[AnyShape]:
        """All that `next_shape` may ask for."""

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` tokens of text and a tree behind them."""

    def begin(self, token: int) -> None:
        """A text begins with `token`, the only one that is in no pair."""

    def extend(self, new: Committed, seq_len: Tensor) -> Any:
        """See the pairs of the last `new.count` committed positions; what `propose` begins from.

        `seq_len` (0-d) counts the committed tokens, those of `new` included.
        """

    def propose(self, prediction: Any, state: DecodeState, spec: CycleSpec) -> DraftTree:
        """A tree of `spec.shape` under `state.root`."""

    def accept_for(self, kind: SamplingMode) -> Accept | None:
        """Return what accepts its trees where the target draws as `kind` says.

        See `CycleSpec.accept`.
        """

    def learn(self, shape: AnyShape | None, outcome: Outcome) -> None:
        """Observe a cycle with a tree of `shape`; None was a plain pass."""


class Controlled:
    """What drafters share that may change their tree while decoding.

    Without a policy (no costs measured yet, or fixed sizes) the tree stays as it is.
    """

    shape: AnyShape
    policy: Policy | None = None
    tuning: Tuning | None = None
    tap_layers: tuple[int, ...] = ()
    always_proposes = True
    looks_up = False

    @property
    def may_skip_head(self) -> bool:
        return False

    @property
    def advanced(self) -> Sequence[Tensor]:
        return []

    def begin(self, token: int) -> None:
        """Draft heads do without the first token."""

    def accept_for(self, kind: SamplingMode) -> Accept | None:
        return None

    def apart(self) -> Self:
        """The same drafter, to be run without changing what this one has learned."""
        return copy.copy(self)

    def next_shape(self) -> AnyShape | None:
        return self.shape if self.policy is None else self.policy.next_shape

    @property
    def thresholds(self) -> Thresholds:
        """Path probabilities from which a gated chain goes on."""
        return Thresholds() if self.policy is None else self.policy.thresholds

    @property
    def lookup_threshold(self) -> float:
        """Path probability from which a looked-up token of a gated chain is verified."""
        return Thresholds().verify[0] if self.policy is None else self.policy.lookup_threshold

    @property
    def head_gain(self) -> float | None:
        """Tokens that a looked-up chain must promise, or the head drafts; None: the head pauses."""
        return START_HEAD_GAIN if self.policy is None else self.policy.head_gain

    def shapes(self) -> Sequence[AnyShape]:
        return [self.shape] if self.policy is None else self.policy.shapes

    def learn(self, shape: AnyShape | None, outcome: Outcome) -> None:
        if self.policy is not None:
            self.policy.learn(shape, outcome)
