"""A draft head's chain in our CPU kernels: what the drafter's own code proposes."""

from __future__ import annotations

import time

import pytest
import torch

from fasteagle.compile.cpu_backend import native_step
from fasteagle.compile.cpu_draft import NativeChain, NativeDraft, Text, can_draft
from fasteagle.decoding.cycle import EAGER
from fasteagle.drafting.base import DraftOps
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.thresholds import LONGEST, Thresholds
from fasteagle.loading.source import quantize_head_, quantize_linear
from fasteagle.options import SamplingParams
from fasteagle.quant.cpu_linear import NativeLinear
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.quant.packed import int8
from fasteagle.quant.scheme import Scheme
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import GatedChain, TreeShape
from fasteagle.tree import HEAD, LOOKUP
from helpers import eagle3_of, empty_state, random_head, random_target, spec_of, tiny_config
from native_models import SHAPE

pytestmark = pytest.mark.usefixtures("cpu_kernels")

HEADS = {
    "eagle1": {},
    "eagle1 without bias": {"fc_bias": False},
    "eagle1, whole vocabulary": {"draft_ids": None},
    "eagle1, large vocabulary": {"draft_ids": torch.arange(60, 1400), "vocab_size": 1400},
    "mtp": {"mtp": True, "fc_bias": False, "qkv_bias": True},
    "eagle3": {"algorithm": "eagle3"},
    "eagle3, normed": {"algorithm": "eagle3", "normed": True},
    "eagle3, window": {"algorithm": "eagle3", "sliding_window": 9},
}
DRAWN = [SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(1.3, seed=2**40 + 7)]


class Always(EagleDrafter):
    """Drafter with the same stopping rule in every cycle."""

    rule = Thresholds((0.0,) * 6, (0.0,) * 6)

    @property
    def thresholds(self) -> Thresholds:
        return self.rule


def even(verify: float, expand: float) -> Thresholds:
    """The same bounds at every depth."""
    return Thresholds((verify,) * 8, (expand,) * 8)


def make(name, dtype=torch.float32, depth=6):
    """A target, and a drafter whose head is in our kernels' layout."""
    options = {"draft_ids": torch.arange(0, 60, 2), "algorithm": "eagle1"} | HEADS[name]
    config = tiny_config(**SHAPE | {"vocab_size": options.pop("vocab_size", 60)})
    target = random_target(config).to(dtype)
    target.init_rope(512, "cpu")
    algorithm, normed = options.pop("algorithm"), options.pop("normed", False)
    changes = dict(norm_before_residual=True, norm_output=True) if normed else {}
    eagle3 = eagle3_of(algorithm, config, **changes)
    head = random_head(target, eagle3=eagle3, rope_base=10000.0, **options)
    for linear in (head.fc, head.block.attention.out, head.block.mlp.down):
        linear.weight.data.mul_(0.1)  # not so sure of everything
    for name, parameter in head.named_parameters():
        if "norm" in name and "block" not in name:
            parameter.data.uniform_(0.5, 1.5)
    if head.config.draft_vocab_size == config.vocab_size and eagle3 is None:
        target.lm_head = QuantizedLMHead(quantize_linear(target.lm_head, Scheme(8), native=True))
        head.borrow(target, 512)
    quantize_head_(head, Scheme(8, head_bits=8), native=True)
    drafter = Always(head, TreeShape(depth, 1, depth))
    drafter.run_by(DraftOps(head=native_step(head)))
    return target, drafter


def begin(target, drafter, length, count, params, seed=0):
    """A state after `length` tokens, `count` pairs pending, those before them shown."""
    state = empty_state(target)
    state.read_aux_layers(drafter.aux_layers, target.config.dim)
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 60, (length,), generator=g)
    features = torch.randn(length, state.features.shape[1], generator=g).to(state.features.dtype)
    drafter.reserve(length + 16)
    old = length - count
    for first in range(0, old, 8):
        n = min(8, old - first)
        state.tokens[:n] = tokens[first : first + n]
        state.features[:n] = features[first : first + n]
        state.count.fill_(n)
        drafter.extend(state.committed(n), torch.tensor(first + n))
    state.tokens[:count], state.features[:count] = tokens[old:], features[old:]
    state.count.fill_(count)
    state.seq_len.fill_(length)
    state.root.copy_(tokens[-1:])
    state.sampling.load(params)
    return state


# Each head after each text (its length, and how many pairs are pending), drawn in turn.
BEHIND = [
    (name, *text, DRAWN[(i + j) % 3])
    for i, name in enumerate(HEADS)
    for j, text in enumerate([(1, 1), (5, 3), (70, 7), (131, 1)])
]
BEHIND += [("eagle3, window", 10, 1, SamplingParams())]  # the first that sees not all the text


@pytest.mark.parametrize(("name", "length", "count", "params"), BEHIND, ids=str)
def test_the_tokens_of_the_drafters_own_code(name, length, count, params):
    target, drafter = make(name)
    assert can_draft(drafter.head)
    spec = spec_of(GatedChain(6), 7, SamplingMode.of(params, 60))
    native = NativeDraft()
    assert native.runs(drafter, spec)
    state = begin(target, drafter, length, count, params)
    expected = EAGER.draft(state, drafter, spec)
    before = drafter.cache.rows.clone()
    window = drafter.head.config.block.sliding_window or length
    seen = max(0, length - count + 1 - window)  # the first key that the first pair sees
    drafter.cache.rows[:, :, :seen] = float("nan")
    drafter.cache.rows[:, :, length - count :] = float("nan")  # the kernels write them
    proposal = native(state, drafter, spec)
    assert proposal.tree.tokens.tolist() == expected.tree.tokens.tolist()
    assert torch.equal(proposal.tree_mask, expected.tree_mask)
    written = slice(seen, length + 5)
    torch.testing.assert_close(
        drafter.cache.rows[:, :, written], before[:, :, written], atol=0.02, rtol=0.02
    )


def test_a_drafter_without_noise_drafts_the_likeliest_tokens():
    """Where the target draws, too."""
    target, drafter = make("eagle1")
    drafter.noise, native, chains = "none", NativeDraft(), []
    for params in DRAWN:
        state = begin(target, drafter, 20, 2, params)
        spec = spec_of(GatedChain(6), 7, SamplingMode.of(params, 60))
        for draft in (native, EAGER.draft):
            chains.append(draft(state, drafter, spec).tree.tokens.tolist())
    assert all(chain == chains[0] for chain in chains)


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_it_ends_where_the_paths_probability_says(name):
    target, drafter = make(name)
    native, spec = NativeDraft(), spec_of(GatedChain(6), 7)
    lengths = set()
    for seed in range(12):
        state = begin(target, drafter, 20, 2, SamplingParams(), seed)
        for rule in (
            even(0.05, 0.1),
            even(0.02, 0.3),
            even(0.3, 0.3),
            even(0.3, 0.05),
            Thresholds((0.3, 0.2, 0.1, 0.05, 0.02, 0.01), (0.3, 0.25, 0.2, 0.1, 0.05, 0.02)),
        ):
            drafter.rule = rule
            expected = EAGER.draft(state, drafter, spec).tree
            tokens = expected.tokens[expected.valid].tolist()
            proposal = native(state, drafter, spec)
            assert proposal.tree.tokens.tolist() == tokens
            assert len(proposal.promised) == len(tokens) - 1
            assert all(p >= b for p, b in zip(proposal.promised, rule.verify, strict=False))
            lengths.add(len(tokens))
    assert len(lengths) > 2  # the root alone, and chains of several lengths


def test_the_chain_of_a_head_has_no_more_tokens_than_are_timed():
    """Those of a lookup may have more."""
    target, drafter = make("eagle1")
    drafter.rule = even(0.0, 0.0)
    state = begin(target, drafter, 20, 2, SamplingParams())
    proposal = NativeDraft()(state, drafter, spec_of(GatedChain(2 * LONGEST), 2 * LONGEST + 1))
    assert len(proposal.promised) == LONGEST == len(proposal.depths) - 1


def test_chains_of_one_length_have_the_source_they_come_from():
    state, native = empty_state(random_target(tiny_config(**SHAPE))), NativeDraft()
    for source in (HEAD, LOOKUP, HEAD):
        proposal = native.proposal(state, torch.tensor([7, 8]), source)
        assert proposal.tree.tokens.tolist() == [0, 7, 8]
        assert proposal.tree.sources.tolist() == [0, source, source]
        assert proposal.extended is (source == HEAD)


def test_what_is_not_finite_ends_a_chain():
    target, drafter = make("eagle1")
    native = NativeDraft()
    state = begin(target, drafter, 20, 2, SamplingParams())
    state.features[1] = float("nan")
    drafter.rule = even(0.01, 0.01)
    proposal = native(state, drafter, spec_of(GatedChain(6), 7))
    assert proposal.tree.tokens.tolist() == state.root.tolist()


def test_wrong_counts_and_lengths_are_refused():
    target, drafter = make("eagle1")
    native, spec = NativeDraft(), spec_of(GatedChain(6), 7)
    state = begin(target, drafter, 20, 2, SamplingParams())
    state.count.fill_(0)
    with pytest.raises(RuntimeError, match="0 pairs"):
        native(state, drafter, spec)
    state.count.fill_(2)
    state.seq_len.fill_(1)
    with pytest.raises(RuntimeError, match="2 pairs"):  # of a text of one token
        native(state, drafter, spec)
    state.seq_len.fill_(10_000)
    with pytest.raises(RuntimeError, match="slots"):
        native(state, drafter, spec)
    state.seq_len.fill_(20)
    drafter.head.rope_cos, drafter.head.rope_sin = (
        table[:24] for table in (drafter.head.rope_cos, drafter.head.rope_sin)
    )
    with pytest.raises(RuntimeError, match="slots"):  # beyond the positions of the head
        NativeDraft()(state, drafter, spec)


def test_other_heads_are_left_to_the_drafters_code():
    target = random_target(tiny_config(**SHAPE))
    drafter = EagleDrafter(random_head(target), TreeShape(3, 1, 3))
    assert not can_draft(drafter.head)
    assert not NativeDraft().runs(drafter, spec_of(GatedChain(6), 7))
    target, drafter = make("eagle1")
    assert not NativeDraft().runs(drafter, spec_of(TreeShape(3, 1, 3), 4))
    drafter.head.fc = torch.nn.Linear(128, 64)
    assert not can_draft(drafter.head), "its block fits"


def sequences(name, pairs, dtype=torch.float32):
    """Texts of several lengths for one draft head, half of them drawn, with caches of their own."""
    target, drafter = make(name, dtype)
    texts = []
    for i, (length, count) in enumerate(pairs):
        own = drafter.apart()
        params = DRAWN[i % len(DRAWN)]
        state = begin(target, own, length, count, params, seed=i)
        spec = spec_of(GatedChain(6), 40, SamplingMode.of(params, 60))
        texts.append(Text(state, own, spec))
    return texts


PAIRS = {
    "few": [(5, 3), (70, 7), (1, 1), (131, 1)],
    "more pairs than rows of a step": [(60, 25), (9, 9), (33, 20), (140, 30), (2, 2)],
    "eight": [(8 * i + 3, i % 3 + 1) for i in range(8)],
    "more texts than rows of a step": [(3 + i % 5, i % 3 + 1) for i in range(35)],
}


# Each head with two of the four.
TOGETHER = [
    (name, pairs) for i, name in enumerate(HEADS) for j, pairs in enumerate(PAIRS) if (i + j) % 2
]


@pytest.mark.parametrize(("name", "pairs"), TOGETHER)
def test_several_texts_draft_what_each_drafts_alone(name, pairs):
    """The same tokens, path probabilities and keys, bit for bit."""
    native = NativeDraft()
    for rule in (even(0.0, 0.0), even(0.02, 0.04)):
        alone, shared = sequences(name, PAIRS[pairs]), sequences(name, PAIRS[pairs])
        for text in (*alone, *shared):
            text.drafter.rule = rule
        expected = [native(*text) for text in alone]
        began = time.perf_counter()
        proposals, seconds = native.together(shared)
        assert sum(seconds) <= time.perf_counter() - began, "each has its share"
        for mine, own, text, other in zip(proposals, expected, shared, alone, strict=True):
            assert mine.tree.tokens.tolist() == own.tree.tokens.tolist()
            assert mine.promised == own.promised
            assert mine.extended == own.extended
            written = int(text.state.seq_len)
            cache, reference = text.drafter.cache.rows, other.drafter.cache.rows
            assert torch.equal(cache[:, :, :written], reference[:, :, :written])
        assert min(seconds) > 0
    assert len({len(proposal.depths) for proposal in proposals}) > 1 or name == "mtp"


@pytest.mark.parametrize("name", ["eagle1, large vocabulary", "mtp", "eagle3, window"])
def test_path_probabilities_do_not_depend_on_the_number_of_threads(name):
    """Two calls may have different numbers: a loud machine makes the kernels leave a core free."""
    promises = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        texts = sequences(name, [(33, 20), (9, 9), (70, 1)])
        for text in texts:
            text.drafter.rule = even(0.0, 0.0)
        promises.append([p.promised for p in NativeDraft().together(texts)[0]])
    assert promises[0] == promises[1] == promises[2]


def test_texts_with_different_rules_are_drafted_by_their_own():
    native, (one, two) = NativeDraft(), sequences("eagle1", [(20, 2), (20, 2)])
    one.drafter.rule, two.drafter.rule = even(0.0, 0.0), even(2.0, 2.0)
    proposals, _ = native.together([one, two])
    assert [len(proposal.depths) for proposal in proposals] == [7, 1]


def other_linear(N: int, K: int) -> NativeLinear:
    return NativeLinear(int8(torch.zeros(N, K), torch.ones(N, 1)), None)


WRONG_WEIGHTS = {
    "embedding.weight": (lambda head: head.embedding.weight[:, ::2], "x is"),
    "rope_sin": (lambda head: head.rope_sin[:9], "cos and sin"),
    "rope_cos": (lambda head: head.rope_cos[:, ::2], "cos and sin"),
    "rope": (lambda head: head.rope_cos[:, :0], "LM head"),
    "lm_head": (lambda head: other_linear(30, 96), "LM head"),
    "fc": (lambda head: other_linear(96, 128), "fc"),
    "fc ": (lambda head: other_linear(64, 64), "fc"),
    "block.attention.out": (lambda head: other_linear(64, 32), "out is"),
    "norm.weight": (lambda head: head.norm.weight[:32], "norms are"),
    "feature_norm.weight": (lambda head: head.norm.weight.repeat(2), "norms are"),
    "embedding_norm.weight": (lambda head: head.norm.weight.repeat(2)[::2], "norms are"),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_weights_of_a_head_that_do_not_fit_are_refused(name):
    head = make("mtp" if "norm" in name else "eagle1")[1].head
    wrong, message = WRONG_WEIGHTS[name]
    *path, last = name.strip().split(".")
    module, value = head.get_submodule(".".join(path)), wrong(head)
    if name.endswith("weight"):
        value = torch.nn.Parameter(value, requires_grad=False)
    if name == "lm_head":
        head.use_lm_head(value)
    elif name == "rope":
        head.rope_cos = head.rope_sin = value
    else:
        setattr(module, last, value)
    with pytest.raises(RuntimeError, match=message):
        NativeChain(head)


def test_what_does_not_fit_a_chain_is_refused():
    """Lists of other lengths, more texts than rows of a step, and tensors that are too small."""
    (text,) = sequences("eagle1", [(20, 2)])
    chain, pairs = NativeDraft().of(text.drafter.head), text.state.committed(2)
    (keys, values), one = text.drafter.cache.layers[0], torch.tensor(1.0)
    features = text.drafter.head.read(pairs.features)
    usual = dict(
        tokens=[pairs.tokens],
        features=[features],
        counts=[pairs.count],
        seq_lens=[text.state.seq_len],
        target_ids=text.drafter.target_ids,
        keys=[keys],
        values=[values],
        temperatures=[None],
        seeds=[None],
        depth=2,
        verify=[0.0],
        expand=[0.0],
    )
    each = [name for name, value in usual.items() if isinstance(value, list)][:-2]

    def run(**changes):
        chain.weights.draft(*(usual | changes).values())

    run()
    ids, apart = usual["target_ids"], torch.zeros(4, dtype=torch.long)[::2]
    for changes, message in (
        *(({name: []}, "of each text") for name in each),
        ({name: [] for name in each}, "of each text"),
        ({name: usual[name] * 33 for name in each}, "of each text"),
        ({"verify": []}, "bounds of path"),
        ({"expand": []}, "bounds of path"),
        ({"depth": 0}, "depth 0"),
        ({"target_ids": ids[:9]}, "a target id each"),
        ({"target_ids": ids.repeat(2)[::2]}, "a target id each"),
        ({"keys": [keys.half()], "values": [values.half()]}, "in bf16 or fp32"),
        ({"keys": [keys[:1]], "values": [values[:1]]}, "cache"),
        ({"keys": [keys[..., :8].contiguous()], "values": [values[..., :8].contiguous()]}, "cache"),
        ({"keys": [keys[:, :20].contiguous()], "values": [values[:, :20].contiguous()]}, "slots"),
        ({"values": [values[:, :9].contiguous()]}, "caches of one shape"),
        ({"tokens": [pairs.tokens[:1]]}, "2 pairs"),
        ({"features": [features[:1]]}, "2 pairs"),
        ({"tokens": [apart]}, "contiguous tokens"),
        ({"features": [features.half()]}, "x in fp32 or bf16"),
        ({"features": [features[:, :32]]}, "x is"),
        ({"tokens": [pairs.tokens - 60]}, "token -"),
        ({"tokens": [pairs.tokens + 60]}, "token "),
        ({"temperatures": [one]}, "a temperature and a seed"),
        ({"seeds": [pairs.count]}, "a temperature and a seed"),
        (
            {name: usual[name] * 2 for name in each}
            | {"keys": [keys, keys.bfloat16()], "values": [values, values.bfloat16()]},
            "caches of one type",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**changes)
