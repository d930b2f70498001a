"""What the kernels of a cycle must yield on a device: "cpu" is a card that is interpreted."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor

from fasteagle.compile import cuda_ops
from fasteagle.compile.int8_cache import core_target
from fasteagle.drafting.lookup import NOTHING, Lookup
from fasteagle.model import KVCache, Target
from fasteagle.options import SamplingParams
from fasteagle.sampling import BAD_ROW, SamplingMode, SamplingTensors, draw
from fasteagle.tree import Pool, TreeView, fuse, relations, rerank
from helpers import eagle3_of, random_head
from interleaved_models import (
    SEQ_LEN,
    KernelBackend,
    filled,
    fused_target,
    pack_lm_head_,
    packed_head,
    packed_target,
    passed,
    view_of,
)


def close(result: Tensor, expected: Tensor, limit: float) -> None:
    error = (result.float().cpu() - expected.float().cpu()).norm() / expected.float().cpu().norm()
    assert error < limit, float(error)


def check_blocks(name: str, accumulate: str, kv: str, device: str) -> None:
    """Results are those of the dense model over such a cache, and bits of a row are its own."""
    target, dense = packed_target(name, accumulate=accumulate)
    reference = core_target(dense, kv)
    expected, _ = passed(reference, 9, torch.float32)
    target.to(device).init_rope(512, device)
    target = fused_target(target, kv)
    whole, whole_cache = passed(target, 9)
    assert (whole_cache.rows.dtype == torch.int8) == (kv == "int8")
    close(whole, expected, 6e-3)
    for T in (1, 2, 5):
        part, cache = passed(target, T)
        assert torch.equal(part, whole[:T])
        end = SEQ_LEN + T
        assert torch.equal(cache.rows[:, :, :end], whole_cache.rows[:, :, :end])
        assert not cache.rows[:, :, end:].any()


def check_step_of_head(name: str, algorithm: str, lm_head: str, device: str) -> None:
    """Logits and the next features, of all rows or of one, against the head in plain torch.

    "eagle3.1": the next features are normed; "eagle3 pre": so is what the residual stream begins
    with.
    """
    target, _ = packed_target(name, vocab_size=64)
    eagle3 = eagle3_of(algorithm[:6], target.config)
    if algorithm in ("eagle3.1", "eagle3 pre"):
        normed = "norm_output" if algorithm == "eagle3.1" else "norm_before_residual"
        eagle3 = dataclasses.replace(eagle3, **{normed: True})
    head, dense = packed_head(random_head(target, eagle3=eagle3, mtp=algorithm == "mtp"))
    tokens, row, view = torch.arange(5) * 7, torch.arange(5), view_of(5, None)
    features = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    results = []
    for made, dtype, place in ((dense, torch.float32, "cpu"), (head, torch.float16, device)):
        borrowed = copy.deepcopy(target)
        if made is head and lm_head == "own kernels":
            pack_lm_head_(borrowed)
        made.to(place).borrow(borrowed.to(place, dtype), 256)
        cache = KVCache(made.config.block, 256, dtype, place)
        cache.rows[:, :, :SEQ_LEN] = filled(Target(target), dtype).rows[:2, :, :SEQ_LEN].to(place)
        seen = TreeView(*(tensor.to(place) for tensor in view[:3]), None)
        mask = seen.mask(256)
        positions, slots = seen.seq_len + seen.depths, seen.seq_len + row.to(place)
        arguments = tokens.to(place), features.to(place, dtype), positions, slots
        if made is head:
            masked = made(*arguments, mask, cache)
            made = KernelBackend(target).step(head)
            for result, expected in zip(made(*arguments, mask, cache), masked, strict=True):
                close(result, expected, 2e-3)  # prompts go on under a mask, by other products
        logits, following = made(*arguments, mask if made is dense else seen, cache)
        if made is not dense:
            some = made(*arguments, seen, cache, torch.tensor([3], device=place))
            close(some[0], logits[3:4], 1e-3)
            assert torch.equal(some[1], following[3:4])
            assert following.dtype == dtype
        results.append((logits, following, cache.rows[:, :, SEQ_LEN : SEQ_LEN + 5]))
    for expected, result in zip(*results, strict=True):
        # Norms before `fc` enlarge what small embeddings lose in fp16.
        features = 4e-3 if algorithm == "mtp" else 2e-3
        close(result, expected, 8e-3 if expected is results[0][0] else features)


def random_pool(P: int, seed: int) -> Pool:
    """Scores fall from parent to child, often by nothing; some candidates are none."""
    generator = torch.Generator().manual_seed(seed)
    parents = (torch.rand(P, generator=generator) * torch.arange(P)).long() - 1
    steps = torch.randint(0, 3, (P,), generator=generator) / 2
    scores = torch.zeros(P)
    for i, parent in enumerate(parents.tolist()):
        scores[i] = (scores[parent] if parent >= 0 else 0) - steps[i]
    scores[torch.rand(P, generator=generator) < 0.1] = float("-inf")
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            scores[i] = torch.minimum(scores[i], scores[parent])
    sources = torch.randint(1, 4, (P,), generator=generator)
    return Pool(torch.randint(0, 99, (P,), generator=generator), scores, parents, sources)


def check_order(P: int, N: int, device: str) -> None:
    """Slow twins are `tree.rerank` and `tree.relations`."""
    root = torch.tensor([7])
    for seed in range(4):
        pool = random_pool(P, seed)
        there = Pool(*(tensor.to(device) for tensor in pool))
        expected, result = rerank(pool, root, N), cuda_ops.rerank(there, root.to(device), N)
        for name, value in expected._asdict().items():
            if value is not None:
                assert torch.equal(getattr(result, name).cpu(), value), (name, seed)
                assert getattr(result, name).dtype == value.dtype
        alone = there._replace(sources=None)
        assert cuda_ops.rerank(alone, root.to(device), N).sources is None
        seen = relations(expected.parents, expected.valid)
        for value, other in zip(seen, cuda_ops.relate(result.parents, result.valid), strict=True):
            assert torch.equal(value, other.cpu()) and value.dtype == other.dtype


def check_draw(V: int, device: str) -> None:
    """Slow twin is `sampling.draw`, also of rows without a finite maximum."""
    wider = 3 * torch.randn(7, V + 3, generator=torch.Generator().manual_seed(V))
    logits = wider[:, :V]
    logits[0], logits[1, V // 2 :] = 0.0, float("-inf")
    logits[2, 7], logits[3, V - 1] = float("inf"), float("nan")
    logits[4] = float("-inf")
    depths = torch.tensor([0, 1, 1, 2, 2, 0, 2])
    modes = (0, {}), (0.8, {}), (1.3, {"top_k": 9}), (0.7, {"min_p": 0.1})
    modes += tuple((temperature, {"repetition_penalty": 1.3}) for temperature in (0, 0.9))
    seen = torch.rand(7, V, generator=torch.Generator().manual_seed(V)) < 0.5
    for dtype in (torch.float32, torch.bfloat16):
        for temperature, rest in modes:
            params = SamplingParams(temperature, seed=V << 33, **rest)
            kind, positions = SamplingMode.of(params, V), torch.tensor([3, 900_000, 2])
            results = []
            for place, by in (("cpu", draw), (device, cuda_ops.draw)):
                own = wider.to(place, dtype)[:, :V], positions.to(place), kind
                tensors = SamplingTensors.of(params, place)
                results.append(by(*own, tensors, seen.to(place), depths.to(place)))
            assert torch.equal(results[0], results[1].cpu()), (dtype, params)
            assert results[0][2:5].tolist() == [BAD_ROW] * 3 and results[1].dtype == torch.int64


def check_lookup(N: int, n_tokens: int, device: str) -> None:
    """Slow twin is `Lookup.propose`: with loops, without a match, at either end of the buffer.

    Once all of a proposal has come, once it is of another text; 128 long matches have been wrong.
    """
    generator = torch.Generator().manual_seed(N)
    text = torch.randint(0, n_tokens, (N,), generator=generator)
    text[10:60], text[60:90] = text[10], text[N - 40 : N - 10]
    there = text.to(device)
    own, other = Lookup(), Lookup(device=device)
    for lookup in (own, other):
        lookup.table[0, -1], lookup.table[1, -1] = 128.0, 0.0
    ends = [0, 1, 2, 3, 7, 12, 21, 29, 29, 33, 58, 64, 70, 89, N // 2, N - 12, N - 1, 15, 27, N - 9]
    sizes = set()
    for i, last in enumerate(ends):
        reach = (8, 1, 63)[i // 7]
        expected = own.propose(text, torch.tensor(last), reach)
        tokens, logp = cuda_ops.look_up(other, there, torch.tensor(last, device=device), reach)
        assert torch.equal(tokens.cpu(), expected[0]), last
        torch.testing.assert_close(logp.cpu(), expected[1], rtol=1e-5, atol=1e-6)
        assert torch.equal(other.last.cpu(), own.last)
        torch.testing.assert_close(other.table.cpu(), own.table, rtol=1e-6, atol=0)
        sizes.add(int(own.last[2]))
        if i == 4:
            text[last], there[last] = n_tokens, n_tokens
    assert sizes >= {0, 8}


def check_fuse(k: int, n_levels: int, R: int, device: str) -> None:
    """Slow twin is `tree.fuse`: chains that leave the draft head's candidates at every level."""
    generator = torch.Generator().manual_seed(k + R)
    for leaves in range(R + 1):
        tokens, parents, path, frontier = [], [], [], [-1]
        for level in range(n_levels):
            begin = len(tokens)
            for parent in frontier:
                tokens += torch.randperm(k + 3, generator=generator)[:k].tolist()
                parents += [parent] * k
            frontier = torch.arange(begin, len(tokens))
            frontier = frontier[torch.randperm(len(frontier), generator=generator)[:k]].tolist()
            below = [i for i in frontier if parents[i] == (path[-1] if path else -1)]
            if len(path) == level and below:
                path.append(below[0])
        E = len(tokens)
        steps = -torch.rand(E, generator=generator)
        steps[-1:] = 1e-3  # of a probability that rounding has made larger than one
        scores = torch.zeros(E)
        for i, parent in enumerate(parents):
            scores[i] = (scores[parent] if parent >= 0 else 0) + steps[i]
        columns = torch.tensor([tokens, parents], dtype=torch.long).view(2, E)
        pool = Pool(columns[0], scores, columns[1])
        looked_up = torch.full((R,), k + 5)
        for i in range(min(leaves, len(path))):
            looked_up[i] = tokens[path[i]]
        logp = -torch.rand(R, generator=generator)
        if leaves % 2:  # the match ends, or there is none
            looked_up[leaves:], logp[leaves:] = NOTHING, float("-inf")
        there = Pool(*(tensor.to(device) for tensor in pool[:3]))
        expected = fuse(pool, k, n_levels, looked_up, logp)
        result = cuda_ops.fuse(there, k, n_levels, looked_up.to(device), logp.to(device))
        for name, value in expected._asdict().items():
            assert torch.equal(getattr(result, name).cpu(), value), (name, leaves)
            assert getattr(result, name).dtype == value.dtype
    if E:  # what is no number is no candidate, as for `rerank`
        there.scores[0] = float("nan")
        none = torch.full((R,), k + 5, device=device)
        result = cuda_ops.fuse(there, k, n_levels, none, logp.to(device))
        children = result.parents == 0
        assert (result.scores[0] == float("-inf")) and (result.scores[children] == -torch.inf).all()
