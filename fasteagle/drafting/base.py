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

from fasteagle.drafting.controller import Controller, Outcome
from fasteagle.drafting.plan import AnyPlan, Ranks
from fasteagle.drafting.sure_chain import ChainController, ChainPlan, Stopping
from fasteagle.model import KVCache
from fasteagle.shapes import AnyShape
from fasteagle.state import Committed, CycleSpec, DecodeState
from fasteagle.tree import DraftTree


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
    capturable: bool  # whether its cycles read nothing on the host

    @property
    def controller(self) -> Controller | None:
        """What chooses its trees while decoding, once costs are known."""

    @property
    def may_skip_head(self) -> bool:
        """Whether drafting decides by itself, in each cycle, to leave the draft head out."""

    @property
    def shape(self) -> AnyShape:
        """Of its trees where no controller chooses another one."""

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

    def follow(self, plan: AnyPlan) -> None:
        """Draft what the plan finds best from now on."""

    def learn(self, shape: AnyShape | None, outcome: Outcome | None) -> None:
        """A pass with a tree of `shape` is over; without an outcome nothing was proposed."""


class Controlled:
    """What drafters share that may change their tree while decoding.

    Without a controller (no costs measured yet, or sizes asked for) the tree stays as it is.
    """

    shape: AnyShape
    controller: Controller | None = None
    tuning: Tuning | None = None
    tap_layers: tuple[int, ...] = ()
    always_proposes = True
    capturable = True

    @property
    def may_skip_head(self) -> bool:
        return False

    @property
    def advanced(self) -> Sequence[Tensor]:
        return []

    def begin(self, token: int) -> None:
        """Draft heads do without the first token."""

    def apart(self) -> Self:
        """The same drafter, to be run without changing what this one has learned."""
        return copy.copy(self)

    def follow(self, plan: AnyPlan) -> None:
        if isinstance(plan, ChainPlan):
            self.controller = ChainController(plan)
        else:
            self.controller = Controller(plan)

    def next_shape(self) -> AnyShape | None:
        return self.shape if self.controller is None else self.controller.next_shape

    @property
    def stopping(self) -> Stopping:
        """Where chains end that are asked for as `SureChain`."""
        chosen = self.controller
        return chosen.stopping if isinstance(chosen, ChainController) else Stopping()

    @property
    def lookup_keep(self) -> float:
        """The same of looked-up chains."""
        chosen = self.controller
        return chosen.lookup_keep if isinstance(chosen, ChainController) else Stopping().keep

    def shapes(self) -> Sequence[AnyShape]:
        planned = [] if self.controller is None else self.controller.plan.shapes
        return planned or [self.shape]

    def learn(self, shape: AnyShape | None, outcome: Outcome | None) -> None:
        if self.controller is not None:
            self.controller.learn_of(shape, outcome)
