"""Draft heads on CUDA that are run for several texts at once: which, and until when.

`test_interpreted_sequences.py` has results.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import torch

from fasteagle.compile import cuda_draft
from fasteagle.compile.cuda_draft import CudaDraft, SharedDraft, Variant
from fasteagle.compile.split_cycles import SplitCycle
from fasteagle.decoding.launch import Launch
from fasteagle.drafting.base import DraftOps
from fasteagle.drafting.draft_head import Prediction
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.quant.scheme import Scheme
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import FusedShape, GatedChain, TreeShape
from fasteagle.tree import Pool
from helpers import fused_drafter, random_head, spec_of
from interleaved_models import KernelBackend, pack_, pack_lm_head_, packed_target

MODE = SamplingMode(greedy=False)


def test_a_head_is_drafted_with_together_until_its_kernels_are_left():
    """Or another drafter comes: shared drafting is of one head."""
    model, _ = packed_target(vocab_size=64)
    taking_turns = KernelBackend(model)
    pack_lm_head_(model)
    backend, heads = KernelBackend(model), [random_head(model, seed=seed) for seed in (1, 2)]
    for head in heads:
        pack_(head.half(), Scheme(4, 64))
    one, two = (EagleDrafter(head, TreeShape(2, 2, 4)) for head in heads)
    for drafter in (one, two):
        backend.adopt(drafter)
        assert backend.drafts_together(drafter) and backend._draft.head is drafter.head
        assert not taking_turns.drafts_together(drafter), "passes are not shared"
    made = backend._draft
    backend.adopt(two)
    assert backend._draft is made, "with what was captured"
    backend.adopt(NgramDrafter())
    assert backend._draft is None
    for replays, is_captured in ((False, True), (True, True), (True, False)):
        backend._may_replay = replays  # as on a device
        draft = backend._draft = mock.Mock(return_value={}, runs=mock.Mock(is_captured=is_captured))
        backend.draft_together([runner := mock.Mock()], [mock.Mock()])
        assert draft.call_args.args[2] is (runner.capture_pass if replays else None)
        assert (backend._draft is not None) is is_captured
    for part in ("drafting", "commits"):
        backend = KernelBackend(model)
        backend.adopt(one)
        backend.leave(part)
        assert backend._draft is None and backend.shares_passes
        assert backend.drafts_together(one) is (part == "commits")
        assert backend.merges_lookup is (part == "drafting")
    for part in ("products", "passes", "drafting"):
        backend = KernelBackend(model)
        assert not backend.leaves_head(one.head)
        backend.leave(part)
        assert backend.leaves_head(one.head)


def test_which_cycles_draft_together():
    """Those that run the same head over trees; where it ranks without noise, as greedy ones."""
    model, _ = packed_target(vocab_size=64)
    head, other = (random_head(model, seed=seed) for seed in (1, 2))
    draft, drawn = CudaDraft(head), SamplingMode(greedy=False)
    drafter = fused_drafter(head, FusedShape(2, 2, 4, 4))

    def variant(shape=drafter.shape, kind=drawn, drafter=drafter):
        return draft._variant(Launch(spec_of(shape, 3, kind), drafter, None))

    usual, greedy = variant(), variant(kind=SamplingMode())
    assert usual[1:4] == (3, 2, 2) and usual.n_slots == drafter.cache.n_slots
    assert greedy.kind.greedy and not usual.kind.greedy
    assert variant(shape=TreeShape(2, 2, 4)) == usual
    assert variant(shape=FusedShape(0, 1, 4, 4)) is None, "looks up alone"
    assert variant(shape=GatedChain(4)) is None and variant(drafter=NgramDrafter()) is None
    assert variant(drafter=fused_drafter(other, drafter.shape)) is None
    drafter.noise = "none"
    assert variant() == greedy


def test_what_a_run_reads_of_its_texts():
    """Rows of texts that are missing, and their blocks, are of none; so is what is past a text."""
    model, _ = packed_target(vocab_size=64)
    head = random_head(model)
    drafters = [EagleDrafter(head, TreeShape(2, 2, 4)) for _ in range(2)]
    fields = {"seed": torch.tensor([5, 6]), "temperature": torch.tensor([0.5, 2.0])}
    states = [
        SimpleNamespace(
            seq_len=torch.tensor(70 + i),
            count=torch.tensor([1 + i]),
            tokens=torch.arange(8) + i,
            features=torch.randn(8, head.config.feature_dim),
            sampling=SimpleNamespace(**{name: both[i] for name, both in fields.items()}),
        )
        for i in range(2)
    ]
    shared = SharedDraft(drafters[0], Variant(4, 3, 2, 2, MODE, 128), states[0].features)
    for texts in ([0, 1], [1, 0]):
        shared.load([(states[i], drafters[i]) for i in texts])
        for into, of in (
            (shared.seq_len, lambda state: state.seq_len),
            (shared._count, lambda state: state.count[0]),
            (shared._tokens, lambda state: state.tokens[:3]),
            (shared._features, lambda state: state.features[:3]),
            (shared.sampling.seed, lambda state: state.sampling.seed),
            (shared.sampling.temperature, lambda state: state.sampling.temperature),
        ):
            assert torch.equal(into[:2], torch.stack([of(states[i]) for i in texts]))
        addresses = [drafters[i].cache.rows.data_ptr() for i in texts]
        assert shared._table[:2, 6].tolist() == addresses and not shared._table[2:].any()
    for rows, n in ((shared._pairs, 3), (shared._level, 2)):
        assert rows._sequences.members.tolist() == [0] * n + [1] * n + [-1] * 2 * n
        firsts = [block[:3] for block in rows._sequences.blocks.tolist()]
        assert firsts[:2] == [[0, 0, n], [1, n, n]] and firsts[2:] == [[-1] * 3] * 2


def test_as_many_texts_as_have_room_for_pairs_and_for_a_level():
    for width, topk, sizes in ((1, 8, [2, 4, 8]), (1, 9, [2, 4]), (17, 2, [2]), (33, 2, [])):
        assert Variant(0, width, 2, topk, MODE, 128).sizes == sizes


def test_all_of_the_candidates_are_copied_into_the_memory_of_a_graph():
    own = Pool(torch.zeros(3).long(), torch.zeros(3), torch.zeros(3).long())
    new = Pool(torch.tensor([7, 8, 9]), torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1, 0, 1]))
    SplitCycle(mock.Mock(), mock.Mock(), mock.Mock(), own).read_pool(new)
    assert all(map(torch.equal, own[:3], new[:3]))


def test_one_text_more_than_a_run_takes_drafts_alone():
    """Of two full runs each keeps what it has drafted: the next one may have the same memory."""
    model, _ = packed_target(vocab_size=64)
    drafter = EagleDrafter(random_head(model), TreeShape(2, 2, 4))
    draft, launch = CudaDraft(drafter.head), Launch(spec_of(drafter.shape, 3), drafter, None)
    memory = Pool(*(torch.zeros(8, 3, dtype=torch.long) for _ in range(3)))
    sizes: list[int] = []

    def run(variant, texts, capture):
        sizes.append(variant.n_texts)
        memory.tokens.fill_(len(sizes))
        return memory

    draft.runs = run
    for n, runs in ((1, []), (2, [2]), (8, [8]), (9, [8]), (16, [8, 8])):
        sizes.clear()
        pools = draft([None] * n, [launch] * n)
        assert sizes == runs and sorted(pools) == list(range(n if n % 8 != 1 else n - 1))
        assert [int(pools[i].tokens[0]) for i in pools] == [1 + i // 8 for i in pools]
    for width, runs in ((17, [2]), (33, [])):  # rows of more texts are too many
        sizes.clear()
        wide = Launch(spec_of(drafter.shape, width), drafter, None)
        assert sorted(draft([None] * 3, [wide] * 3)) == list(range(2 * len(runs)))
        assert sizes == runs


def test_every_run_is_launched_to_be_compiled():
    """Greedy and drawn, whatever the cycles are, and in all numbers of texts."""
    model, _ = packed_target(vocab_size=64)
    drafter = EagleDrafter(random_head(model), TreeShape(2, 2, 4))
    specs = [spec_of(drafter.shape, 3), spec_of(drafter.shape, 9), spec_of(None)]
    with mock.patch.object(cuda_draft, "SharedDraft") as made:
        CudaDraft(drafter.head).launch_all(mock.Mock(), drafter, specs)
    variants = [call.args[1] for call in made.call_args_list]
    own = [(v.n_texts, v.width, v.kind.greedy) for v in variants]
    expected = [*itertools.product((2, 4, 8), [3], (True, False))]
    assert sorted(own) == sorted([*expected, *itertools.product((2, 4), [9], (True, False))])
    assert made.return_value.launch_all.call_count == len(variants)


def test_levels_are_ranked_too_where_kernels_are_launched_to_be_compiled():
    """A kernel is another one where the rows of its logits are a multiple of 16."""
    model, _ = packed_target(vocab_size=64)
    drafter, ranked = EagleDrafter(random_head(model), TreeShape(2, 2, 4)), []
    drafter.run_by(DraftOps(lambda logits, k: ranked.append((len(logits), k))))
    shared = SharedDraft(drafter, Variant(8, 3, 2, 2, MODE, 128), torch.zeros(8, 128))
    output = {"return_value": Prediction(torch.zeros(8, 64), torch.zeros(8, 128))}
    level = mock.Mock(return_value=(torch.zeros(16, 64), torch.zeros(16, 128)))
    with mock.patch.multiple(EagleDrafter, extend=mock.Mock(**output), step=level):
        shared.launch_all()
    assert ranked == [(8, 2), (16, 2)]


def test_a_run_for_several_leaves_the_drafter_its_own_cache():
    model, _ = packed_target(vocab_size=64)
    drafter = EagleDrafter(random_head(model), TreeShape(2, 2, 4))
    shared = SharedDraft(drafter, Variant(2, 3, 2, 2, MODE, 128), torch.zeros(8, 128))
    own, caches = drafter.cache, []
    with mock.patch.object(EagleDrafter, "extend", lambda self, *_: caches.append(self.cache)):
        shared._extended()
    assert caches == [shared._pairs.cache] and drafter.cache is own
    assert shared._drafter.cache is shared._level.cache
