"""EAGLE-1's own verification: multi-round speculative sampling over sampled children.

It is the second way to verify, present for fidelity to the paper (algorithm 1). The emitted
distribution is the target's, as with sample-and-match, but a given seed yields other text than
plain decoding. It runs on the host, row by row, and needs trees whose children were *sampled*.

Shapes: T tree rows, V target vocabulary, D deepest level.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from fasteagle.sampling import BAD_ROW, process_logits
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import DraftTree, Proposal
from fasteagle.verify import PAD, Accepted, seen_rows

DRAFT_STREAM = 0x5DEECE66D  # changes the seed for sampling children


def accept_sampled(
    state: DecodeState, spec: CycleSpec, proposal: Proposal, logits: Tensor
) -> Accepted:
    """Accept a path by multi-round sampling, see `CycleSpec.accept`.

    It reads device values on the host, so no CUDA graph can contain it.
    """
    tree = proposal.tree
    assert tree.distributions is not None, "its drafter samples the children"
    seen = seen_rows(state.seen, proposal) if spec.kind.penalty else None
    probs = process_logits(logits.float(), spec.kind, state.sampling, seen).softmax(-1)
    seed, position = int(state.sampling.seed), int(state.seq_len)
    return multi_round(probs, tree.distributions, tree, spec.depth, seed, position)


def multi_round(
    target: Tensor, draft: Tensor, tree: DraftTree, depth: int, seed: int, position: int
) -> Accepted:
    """Walk from the root; at each node try the children in the order they were sampled.

    `target` and `draft` [T, V] are each row's next-token probabilities. A child is accepted with
    probability min(1, p / q); after a rejected one the next is tried with the residual of p, and
    with q without the rejected child. When none is left, the token comes from what remains of p;
    it is `BAD_ROW` where p is not finite.
    """
    # The generator reads 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {position}".encode()))
    tokens, parents, valid = (t.tolist() for t in tree[:3])
    rows, emitted = [0], []
    while True:
        row = rows[-1]
        p, q = target[row].double().cpu(), draft[row].double().cpu()
        if not p.isfinite().all():
            emitted.append(BAD_ROW)
            break
        children = [j for j in range(1, len(tokens)) if parents[j] == row and valid[j]]
        accepted = None
        for child in children:
            token = tokens[child]
            if torch.rand((), generator=generator, dtype=torch.double) * q[token] < p[token]:
                accepted = child
                break
            p = _normalized((p - q).clamp(min=0), p)
            q[token] = 0
            q = _normalized(q, q)
        if accepted is None:
            emitted.append(int(torch.multinomial(p, 1, generator=generator)))
            break
        rows.append(accepted)
        emitted.append(tokens[accepted])
    fill = depth + 1 - len(rows)
    device = tree.tokens.device
    return Accepted(
        torch.tensor(rows + [0] * fill, device=device),
        torch.tensor(emitted + [PAD] * fill, device=device),
        torch.tensor(len(emitted), device=device),
    )


def _normalized(x: Tensor, otherwise: Tensor) -> Tensor:
    """Return x normalized to probabilities; `otherwise` where x is 0 by rounding."""
    total = x.sum()
    return x / total if total > 0 else otherwise
