"""Draws: against transformers' processors, against exact probabilities, and reproducible."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fasteagle import sampling
from fasteagle.options import SamplingParams
from fasteagle.sampling import BAD_ROW, SamplingMode
from helpers import drawing

CHI2 = 27.88  # its 99.9 % point at 9 degrees of freedom


def draw(logits, positions, params, seen=None, depths=None):
    return sampling.draw(logits, positions, *drawing(params, logits.shape[-1]), seen, depths)


def process_logits(logits, params, seen=None):
    return sampling.process_logits(logits, *drawing(params, logits.shape[-1]), seen)


def gumbel_noise(seed, positions, tokens):
    return sampling.gumbel_noise(torch.tensor(seed), positions, tokens)


def top_p_threshold(probs, top_p, looks=True):
    """Threshold from the likeliest tokens where they decide; else, as on CUDA, by a search."""
    with mock.patch.object(sampling, "_may_look", lambda x: looks):
        return sampling.top_p_threshold(probs, torch.tensor(top_p))


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_a_search_for_top_p_takes_little_memory_unless_it_is_compiled():
    """Digits of one bit find the threshold that digits of four bits do."""
    probs = random_logits(rows=7, vocab=500).softmax(-1)
    probs[0], probs[1, 3:] = 1.0, 0.0
    weights = probs / probs.amax(-1, keepdim=True)
    with Largest() as made:
        threshold = top_p_threshold(weights, 0.9, looks=False)
    assert made.numel == weights.numel()
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        assert torch.equal(threshold, top_p_threshold(weights, 0.9, looks=False))


def random_logits(rows=5, vocab=200, scale=3.0, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def theirs(logits, params, history):
    """The processors of transformers, in the order its `generate` uses them."""
    import transformers as t

    processors = []
    if params.repetition_penalty != 1:
        processors.append(t.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.greedy:
        processors.append(t.TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(t.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(t.TopPLogitsWarper(params.top_p))
        if params.min_p:
            processors.append(t.MinPLogitsWarper(params.min_p))
    for processor in processors:
        logits = processor(history, logits)
    return logits


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=7),
        SamplingParams(temperature=1.0, top_k=1000),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.7, top_p=0.05),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=0.8, repetition_penalty=1.4),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(0.9, 40, 0.85, 0.02, 1.1),
    ],
)
def test_processing_equals_transformers(params):
    logits = random_logits()
    history = torch.randint(0, 200, (5, 30), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(5, 200, dtype=torch.bool).scatter_(1, history, True)
    ours = process_logits(logits, params, seen)
    expected = theirs(logits.clone(), params, history)
    assert torch.equal(ours.isinf(), expected.isinf())
    finite = ~expected.isinf()
    assert torch.allclose(ours[finite], expected[finite], atol=1e-6)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize(
    ("probs", "top_p", "n_left"),
    [
        ([0.25, 0.25, 0.25, 0.25], 0.5, 4),  # ties stay together
        ([1.0] * 150_000 + [0.5] * 150_000, 0.9, 300_000),  # their sum fits into 64 bits
        ([0.4, 0.3, 0.3, 0.0], 0.5, 3),
        ([0.5, 0.25, 0.125, 0.125], 0.5, 1),  # the mass is top_p exactly
        ([0.5, 0.25, 0.125, 0.125], 0.75, 2),
        ([0.5, 0.25, 0.125, 0.125], math.nextafter(0.5, 1) + 1e-7, 2),
    ],
)
def test_the_nucleus_ends_with_the_token_that_reaches_its_mass(looks, probs, top_p, n_left):
    row = torch.tensor([probs])
    assert int((row >= top_p_threshold(row, top_p, looks)).sum()) == n_left


def test_the_nucleus_does_not_depend_on_the_order_of_sums():
    """Tokens in any order, rows together or alone, have one threshold: that of exact sums."""
    probs = random_logits(16, 32003, seed=3).softmax(-1)
    sums = (likely := probs.double().sort(descending=True).values).cumsum(-1)
    last = (sums < 0.97 * sums[:, -1:]).sum(-1, keepdim=True)
    order = torch.randperm(32003, generator=torch.Generator().manual_seed(4))
    for looks in (True, False):
        together = top_p_threshold(probs, 0.97, looks)
        assert torch.equal(together.double(), likely.gather(-1, last))
        assert torch.equal(top_p_threshold(probs[:, order], 0.97, looks), together)
        alone = [top_p_threshold(row.unsqueeze(0), 0.97, looks) for row in probs]
        assert torch.equal(torch.cat(alone), together)


def test_min_p_does_not_depend_on_the_order_of_sums():
    """It compares with the likeliest token of a row, which is the same in any order."""
    logits = 3 * random_logits(16, 32003, seed=3)
    params = SamplingParams(1.0, min_p=0.02)
    together = process_logits(logits, params)
    assert 16 < int(together.isfinite().sum()) < 16 * 3000
    order = torch.randperm(32003, generator=torch.Generator().manual_seed(4))
    assert torch.equal(process_logits(logits[:, order], params), together[:, order])
    alone = [process_logits(row.unsqueeze(0), params) for row in logits]
    assert torch.equal(torch.cat(alone), together)


def test_the_only_allowed_token_is_drawn_whatever_its_noise():
    """The hash of this token rounds to 1, where the noise of an unbounded logarithm is -inf."""
    logits = torch.full((1, 2**18), float("-inf"))
    logits[0, 208526] = 0.0
    drawn = draw(logits, torch.tensor([209]), SamplingParams(1.0, seed=0))
    assert drawn.tolist() == [208526]


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(1234, torch.arange(64), torch.arange(4096)).flatten().double()
    assert abs(noise.mean() - 0.57722) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    for q in (0.001, 0.1, 0.5, 0.9, 0.999):
        assert abs((noise < -math.log(-math.log(q))).double().mean() - q) < 0.003
    assert noise.isfinite().all()


def test_noise_reaches_far_beyond_24_bits():
    """A 24-bit uniform ends at 16.6; among 2^26 draws larger ones must occur."""
    top = max(
        gumbel_noise(5, torch.arange(i, i + 64), torch.arange(2**15)).max().item()
        for i in range(0, 2048, 64)
    )
    assert top > 17


def test_noise_depends_on_seed_position_and_token_only():
    whole = gumbel_noise(9, torch.arange(100, 110), torch.arange(50))
    assert torch.equal(whole[3:5], gumbel_noise(9, torch.tensor([103, 104]), torch.arange(50)))
    assert torch.equal(whole[:, :20], gumbel_noise(9, torch.arange(100, 110), torch.arange(20)))
    for other in (10, 9 + 2**32, 9 + 2**40):
        assert not torch.equal(whole, gumbel_noise(other, torch.arange(100, 110), torch.arange(50)))
    assert not torch.equal(whole[0], whole[1])
    for hashed in (0, -1):  # the largest noise and the least
        with mock.patch.object(sampling, "_mix", lambda x, to=hashed: torch.full_like(x, to)):
            assert gumbel_noise(9, torch.arange(3), torch.arange(4)).isfinite().all()


def test_logits_of_half_precision_are_processed_in_fp32():
    logits = random_logits(4000, 50).bfloat16()
    params, positions = SamplingParams(0.7), torch.arange(4000)
    assert torch.equal(draw(logits, positions, params), draw(logits.float(), positions, params))


def test_noise_of_neighbours_is_uncorrelated():
    noise = gumbel_noise(3, torch.arange(512), torch.arange(512)).double()
    other = gumbel_noise(4, torch.arange(512), torch.arange(512)).double()
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise, other)):
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation) < 0.01


@pytest.mark.parametrize(
    "params",
    [SamplingParams(1.0), SamplingParams(0.7, top_p=0.9), SamplingParams(1.5, top_k=6, min_p=0.02)],
)
def test_draws_follow_the_processed_distribution(params):
    """Chi-square over 20,000 positions of the same logits."""
    logits = random_logits(1, 10, scale=1.5, seed=4)
    n = 20_000
    tokens = draw(logits.expand(n, -1), torch.arange(n), params)
    expected = process_logits(logits, params).softmax(-1)[0].double() * n
    counts = torch.bincount(tokens, minlength=10).double()
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi2 = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi2 < CHI2


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.8, top_p=0.9)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_marked(params, bad):
    logits = random_logits(3, 20)
    logits[1, 4] = bad
    tokens = draw(logits, torch.arange(3), params)
    assert tokens[1] == BAD_ROW and tokens[0] != BAD_ROW and tokens[2] != BAD_ROW


def test_the_likeliest_decide_the_nucleus_where_they_can():
    """Both ways to the threshold agree, also in a batch where only some rows need the long one."""
    g = torch.Generator().manual_seed(0)
    spread = torch.tensor([0.1, 1.0, 3.0, 8.0]).unsqueeze(1)
    probs = (torch.randn(4, 3000, generator=g) * spread).softmax(-1)
    for top_p in (0.05, 0.5, 0.9, 0.999):
        expected = top_p_threshold(probs, top_p, looks=False)
        both = top_p_threshold(probs, top_p)
        assert torch.equal(both, expected)
        for row in range(4):
            assert torch.equal(
                top_p_threshold(probs[row : row + 1], top_p), expected[row : row + 1]
            )
    assert top_p_threshold(probs[:1], 0.9) < probs[0].topk(256).values[-1]  # the long way was taken


def test_rows_of_one_depth_share_their_noise():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    params, depths = SamplingParams(1.0, seed=3), torch.tensor([0, 1, 1, 2, 1])
    apart = draw(logits, 40 + depths, params)
    assert torch.equal(draw(logits, torch.tensor([40, 41, 42]), params, None, depths), apart)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (SamplingParams(top_k=5, top_p=0.5), SamplingMode()),
        (SamplingParams(0.8), SamplingMode(False)),
        (SamplingParams(0.8, top_k=64), SamplingMode(False, top_k=64)),
        (SamplingParams(0.8, top_k=65), SamplingMode(False, top_k=300)),
        (SamplingParams(0.8, top_k=300), SamplingMode(False)),
        (SamplingParams(0.8, top_p=0.9, min_p=0.1), SamplingMode(False, top_p=True, min_p=True)),
        (SamplingParams(0.8, top_p=0.9), SamplingMode(False, top_p=True)),
        (SamplingParams(0.8, min_p=0.1), SamplingMode(False, min_p=True)),
        (SamplingParams(repetition_penalty=1.1), SamplingMode(penalty=True)),
    ],
)
def test_one_variant_serves_all_values_of_a_kind(params, kind):
    assert SamplingMode.of(params, 300) == kind
    excludes = process_logits(random_logits(2, 300), params).isinf().any()
    assert kind.filtered == excludes  # kernels draw without a filter else


@pytest.mark.parametrize("top_k", [1, 2, 63, 64, 65, 1024, 1025, 1999])
def test_a_variant_of_top_k_keeps_as_many_as_asked(top_k):
    finite = process_logits(random_logits(2, 2000), SamplingParams(1.0, top_k=top_k)).isfinite()
    assert finite.sum(-1).tolist() == [top_k, top_k]
