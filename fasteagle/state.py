"""State of a sequence between decode cycles: tensors at fixed addresses, nothing on the host.

Shapes: P rows of `pending`, F feature dim, N tokens of the longest text, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.model import KVCache, Transformer
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode, SamplingTensors
from fasteagle.shapes import MAX_DEPTH, AnyShape, FusedShape, GatedChain, TreeShape
from fasteagle.tree import DraftTree, Proposal
from fasteagle.verify import Accepted

PENDING = 256  # most pairs stored for a draft head that is not run for a while
READ_AT_ONCE = 32  # most of them that it reads in a cycle, one step of our CPU kernels


class Committed(NamedTuple):
    """Committed pairs for a draft head: the feature of a position and the token after it.

    Only the first `count` rows are real, the others padding; the last real pair belongs to the
    last committed position.
    """

    tokens: Tensor  # [W]
    features: Tensor  # [W, F]
    count: Tensor  # [1]


# Arguments: state, spec, proposal, the target's logits. Returns the accepted path.
Accept = Callable[["DecodeState", "CycleSpec", Proposal, Tensor], Accepted]


@dataclasses.dataclass(frozen=True)
class CycleSpec:
    """Constants of one variant of the cycle; all else is a value on the device.

    `shape` None is plain decoding: a tree of the root alone. `width` is the number of pending pairs
    that the draft head is run on. Where it is not run (see `extends`), `width` 1 means that pairs
    are stored for it, and 0 that the drafter reads no features. `accept` chooses the accepted path;
    None is the path along the target's own samples.
    """

    shape: AnyShape | None
    width: int
    kind: SamplingMode
    accept: Accept | None = None

    @property
    def rows(self) -> int:
        """Largest number of rows of the pass, root included."""
        return 1 if self.shape is None else self.shape.rows

    @property
    def depth(self) -> int:
        """Length of the longest path that can be accepted."""
        return 0 if self.shape is None else self.shape.depth

    @property
    def in_place(self) -> bool:
        """Return whether accepted rows are in their final cache slots already: those of a chain."""
        return isinstance(self.shape, (TreeShape, GatedChain)) and self.shape.topk == 1

    @property
    def extends(self) -> bool:
        """Return whether the drafter is shown the pending pairs.

        In a plain cycle, and in one that only looks up, they stay pending.
        """
        return runs_head(self.shape)


def runs_head(shape: AnyShape | None) -> bool:
    """Return whether drafting a tree of `shape` runs the draft head, if there is one."""
    skips = isinstance(shape, FusedShape) and not shape.levels
    return shape is not None and not skips


class DecodeState:
    """State of one sequence between two cycles.

    `seq_len` tokens are committed, their keys and values in `cache`; `root` is the token after
    them, sampled already. The first `count` rows of `tokens` and `features` are the pending pairs:
    the last ones, which the draft head has not seen. `text` holds the committed tokens and the
    root; entries past them are left over from other cycles. The host reads `result`: the new
    tokens, padded, then how many of them the lookup had proposed (where a tree says so), then the
    number of drafted tokens. Features are those after the final norm, or those entering
    `aux_layers` where the drafter reads these.
    """

    def __init__(self, target: Transformer, cache: KVCache, max_seq_len: int) -> None:
        weight = target.norm.weight
        device = weight.device

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.long, device=device)

        self.seq_len = ints()  # 0-d
        self.root = ints(1)
        self.count = ints(1)
        self.tokens = ints(PENDING)
        self.aux_layers: tuple[int, ...] = ()
        self.features = weight.new_zeros(PENDING, target.config.dim)  # [P, F]
        self.text = ints(max_seq_len + MAX_DEPTH + 2)  # [N]
        self.result = ints(MAX_DEPTH + 3)
        self.seen = torch.zeros(1, target.config.vocab_size, dtype=torch.bool, device=device)
        self.sampling = SamplingTensors(device)
        self.cache = cache

    def read_aux_layers(self, aux_layers: tuple[int, ...], dim: int) -> None:
        """Store what enters `aux_layers` of the target from now on; without any, final features.

        `dim` is the target's. Pending pairs are lost.
        """
        self.aux_layers = aux_layers
        self.features = self.features.new_zeros(PENDING, dim * max(1, len(aux_layers)))

    @property
    def advanced(self) -> list[Tensor]:
        """Tensors that a cycle changes, other than cache rows past the text."""
        return [
            self.seq_len,
            self.root,
            self.count,
            self.tokens,
            self.features,
            self.result,
            self.seen,
        ]

    def root_alone(self) -> DraftTree:
        """Return the tree of plain decoding."""
        only = torch.ones_like(self.root, dtype=torch.bool)
        return DraftTree(self.root, torch.zeros_like(self.root), only)

    def committed(self, width: int) -> Committed:
        """Return the pending pairs, padded to `width` rows."""
        return Committed(self.tokens[:width], self.features[:width], self.count)

    def load(self, text: Sequence[int], feature: Tensor | None, params: SamplingParams) -> None:
        """Begin after `text`, whose last token is the root; one pair is pending.

        `feature` [1, F] is that of the last committed token; None where no drafter reads it.
        """
        ids = torch.tensor(text, device=self.root.device)
        self.text[: len(text)] = ids
        self.seq_len.fill_(len(text) - 1)
        self.root.copy_(ids[-1:])
        self.count.fill_(1)
        self.tokens[:1] = ids[-1:]
        if feature is not None:
            self.features[:1] = feature
        self.sampling.load(params)

    def keep_last_pair(self, count: int) -> None:
        """Drop all pending pairs but the last of `count`."""
        self.tokens[:1] = self.tokens[count - 1 : count].clone()
        self.features[:1] = self.features[count - 1 : count].clone()
        self.count.fill_(1)
