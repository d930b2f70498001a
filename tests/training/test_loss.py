"""Losses of a draft head, its batches, and its quality by simulated drafting."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.prompts import Conversation
from fasteagle.shapes import TreeShape
from fasteagle.training import held_out, train
from fasteagle.training import loss as loss_module
from fasteagle.training.data import Features
from fasteagle.training.held_out import draft_rows, evaluate
from fasteagle.training.loss import TokenLoss, batches, head_loss, make_batch, token_losses, unroll
from fasteagle.training.options import LOSSES
from fasteagle.training.parallel import Ranks
from helpers import eagle3_of, pairs, random_head
from training_cases import OPTIONS, new_head_ready

CPU = torch.device("cpu")


def head_at_work(head) -> HeadDrafter:
    """A head with an empty cache of 256 slots."""
    drafter = EagleDrafter(head, TreeShape())
    drafter.reserve(240)
    return drafter


@pytest.mark.parametrize("algorithm", ["eagle1", "mtp", "eagle3", "eagle3.1"])
@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_unrolled_steps_equal_drafting_with_the_cache(target, algorithm, window):
    """Each row's s-th prediction equals that of the head fed its own features s times."""
    changes = {"aux_norm": "each", "norm_output": True} if algorithm == "eagle3.1" else {}
    eagle3 = eagle3_of(algorithm[:6], target.config, **changes)
    head = random_head(target, eagle3=eagle3, sliding_window=window, mtp=algorithm == "mtp")
    tokens = torch.randint(0, 60, (14,), generator=torch.Generator().manual_seed(1))
    size = (14, head.config.feature_dim)
    features = torch.randn(size, generator=torch.Generator().manual_seed(2))
    outputs = unroll(head, head._embedding[0](tokens)[None], features[None], 4)
    rows = draft_rows(head, target)
    for start in (1, 5, 9):
        seq_len = torch.tensor(start)
        drafter = head_at_work(head)
        logits, feature = drafter.extend(pairs(tokens[:start], features[:start]), seq_len)
        assert torch.allclose(logits[0], rows @ outputs[0][0, start - 1], atol=1e-3)
        for step in range(1, 4):
            row = start - 1 + step
            paths = torch.arange(step, dtype=torch.int32)[None]
            token = tokens[row : row + 1]
            logits, feature = drafter.step(token, feature, seq_len, step - 1, paths, step - 1)
            expected = rows @ outputs[step][0, row]
            assert torch.allclose(logits[0], expected, atol=1e-3), (start, step)


@pytest.fixture
def in_fp32(monkeypatch):
    """Training and evaluation without bf16, whose rounding could turn a tie."""
    for module in (held_out, loss_module, train):
        monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float32)


@torch.no_grad()
def test_simulated_acceptance_equals_what_the_engine_measures(trainer, target, store, in_fp32):
    """Chains drafted at every position of greedy text, by hand, against `evaluate`."""
    made = trainer(dataclasses.replace(OPTIONS, steps=120))
    with torch.enable_grad():
        made.run(every=200)
    head = made.head
    held = evaluate(head, target, store, list(range(3, 9)))
    tried, accepted = [0] * 5, [0] * 5
    drafted: list[tuple[float, bool]] = []  # confidence of each child, and whether it is right
    variations = []  # at the first step, by the probabilities of target and draft head
    for i in range(3, 9):
        ids, features = store.conversation(i)
        features = features.float()
        for root in range(store.conversations[i].prompt_len, len(ids) - 1):
            drafter, seq_len = head_at_work(head), torch.tensor(root)
            known = pairs(ids[1 : root + 1], features[:root])
            (logits, feature), step = drafter.extend(known, seq_len), 0
            wanted = (features[root] @ target.lm_head.weight.T).softmax(-1)
            wanted[head.target_ids()] -= logits[0].softmax(-1)
            variations.append(wanted.abs().sum().item() / 2)
            while step < 5 and root + step < len(ids) - 1:
                tried[step] += 1
                token = int(head.target_ids()[logits.argmax()])
                best = int((features[root + step] @ target.lm_head.weight.T).argmax())
                confidence, children = torch.softmax(logits[0], -1).topk(4)
                for p, child in zip(confidence.tolist(), children.tolist(), strict=True):
                    drafted.append((p, int(head.target_ids()[child]) == best))
                if token != best:
                    break
                accepted[step] += 1
                paths = torch.arange(step + 1, dtype=torch.int32)[None]
                row = ids[root + 1 + step : root + 2 + step]
                logits, feature = drafter.step(row, feature, seq_len, step, paths, step)
                step += 1
    assert tried[0] == held.rows and accepted[0] > 5 and accepted[1] > 0
    for step in range(5):
        if tried[step]:
            assert held.alphas[step] == pytest.approx(accepted[step] / tried[step])
    assert held.tv[0] == pytest.approx(sum(variations) / len(variations), abs=1e-4)
    expect_tenths(held.by_confidence, drafted)


def expect_tenths(by_confidence, drafted: list[tuple[float, bool]]) -> None:
    """All of `drafted`, each in the tenth of its confidence; beside an edge, on either side.

    The sums of a batch and of a drafter round differently, by far less than `EDGE`.
    """
    EDGE = 1e-4
    hits = [p for p, is_right in drafted if is_right]
    for column, confidences in enumerate(([p for p, _ in drafted], hits)):
        counts = [tenth[column] for tenth in by_confidence]
        assert sum(counts) == len(confidences)
        for edge in range(1, 10):
            low = sum(p < edge / 10 - EDGE for p in confidences)
            high = sum(p < edge / 10 + EDGE for p in confidences)
            assert low <= sum(counts[:edge]) <= high <= low + 3, edge
    assert sum(n > 0 for n, _ in by_confidence) > 2 and len(hits) > 5


def test_several_processes_evaluate_a_part_of_the_conversations_each(trainer, target, store):
    made = trainer(dataclasses.replace(OPTIONS, steps=40))
    made.run(every=40)
    others: list[list[torch.Tensor]] = []

    class OneByOne(Ranks):
        def sum_(self, tensors) -> None:
            mine = list(tensors)
            for parts in others:
                for tensor, part in zip(mine, parts, strict=True):
                    tensor += part
            others.append([tensor.clone() for tensor in mine])

    indices = list(range(3, 10))
    parts = [evaluate(made.head, target, store, indices, ranks=OneByOne(r, 2)) for r in range(2)]
    whole = evaluate(made.head, target, store, indices)
    assert parts[1] == whole != parts[0] and whole.alphas[0] > 0
    assert 0 < parts[0].rows < whole.rows


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("has_own", [False, True])
def test_token_losses_and_their_gradients(kind, has_own):
    """Of predictions, and of the rows of a draft head with an LM head of its own."""
    g = torch.Generator().manual_seed(0)
    p, own, t, rows = (
        torch.randn(n, 16, generator=g, dtype=torch.double) for n in (700, 50, 700, 50)
    )
    drafting, trained = (own, (p, own)) if has_own else (rows, (p,))
    for tensor in trained:
        tensor.requires_grad_(True)
    loss = TokenLoss.apply(p, t, rows, own if has_own else None, kind)
    wanted, q = (t @ rows.T).softmax(-1), (p @ drafting.T).softmax(-1)
    entropy, variation = -(wanted * q.log()).sum(-1), (wanted - q).abs().sum(-1) / 2
    w = torch.exp(-3 * (1 - variation)).detach()
    expected = {
        "paper": entropy,
        "lk": -(1 - variation).log(),
        "mixed": w * entropy + (1 - w) * variation,
    }[kind].mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    exact = torch.autograd.grad(3 * expected, trained)
    for gradient, autograd in zip(torch.autograd.grad(3 * loss, trained), exact, strict=True):
        assert torch.allclose(gradient, autograd, atol=1e-9)


def test_the_acceptance_rate_is_learned_from_a_cold_start():
    """Where draft head and target share no token, the gradient of -log alpha does not vanish."""
    logits, wanted = torch.tensor([[30.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    gradient = token_losses(logits, wanted, "lk")[1]
    assert torch.allclose(gradient, torch.tensor([[1.0, -1.0, 0.0]]), atol=1e-4)
    assert torch.allclose(gradient, token_losses(logits, wanted, "paper")[1], atol=1e-4)
    assert all(part.isfinite().all() for part in token_losses(30 * logits, wanted, "lk"))


@pytest.mark.parametrize(
    ("ce_weight", "feature_weight"), [(0.1, 1.0), (2.0, 0.0), (0.5, 3.0), (0.0, 1.0)]
)
def test_the_loss_is_the_weighted_sum_of_its_two_terms(target, store, ce_weight, feature_weight):
    options = dataclasses.replace(
        OPTIONS, noise=0.0, ce_weight=ce_weight, feature_weight=feature_weight
    )
    head = new_head_ready(target, options)
    rows, batch = target.head_rows(torch.arange(30)), make_batch(store, [3, 4], CPU)
    loss = head_loss(head, rows, batch, options, 0)
    embeds = head.embedding.weight[batch.tokens]
    predicted = unroll(head, embeds, batch.features.float(), 1)[0][batch.counted(0)]
    true = batch.targets[batch.counted(0)].float()
    wanted = (true @ rows.T).softmax(-1)
    tokens = -(wanted * (predicted @ rows.T).log_softmax(-1)).sum(-1).mean()
    features = torch.nn.functional.smooth_l1_loss(predicted, true)
    assert tokens > 0.1 and features > 0.01
    expected = ce_weight * tokens + feature_weight * features
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


def test_steps_ahead_weigh_less_and_parts_of_a_batch_add_up(target, store):
    options = dataclasses.replace(OPTIONS, noise=0.0, self_fed_steps=3, self_fed_decay=0.5)
    head = new_head_ready(target, options)
    rows, batch = target.head_rows(torch.arange(30)), make_batch(store, [3, 4], CPU)
    # The last step has no row that counts, the one before those of one conversation alone.
    batch.last = batch.first + torch.tensor([2, 3])
    whole = head_loss(head, rows, batch, options, 0)
    embeds, expected = head.embedding.weight[batch.tokens], 0.0
    for n, predicted in enumerate(unroll(head, embeds, batch.features.float(), 3)):
        p, t = predicted[batch.counted(n)], batch.targets[batch.counted(n)]
        tokens = TokenLoss.apply(p, t, rows)
        features = torch.nn.functional.smooth_l1_loss(p, t.float())
        expected += 0.5**n * (options.ce_weight * tokens + options.feature_weight * features)
    assert whole.item() == pytest.approx(expected.item() / 1.75, rel=1e-4)
    parts = []
    for b, i in enumerate((3, 4)):
        part = make_batch(store, [i], CPU)
        part.last = batch.last[b : b + 1]
        parts.append(head_loss(head, rows, part, options, 0, batch.counts(4)).item())
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-4)


def test_a_head_that_is_certain_is_measured(target, store_3):
    head = random_head(target, eagle3=eagle3_of("eagle3", target.config, own_lm_head=True))
    head.own_lm_head.weight.data.mul_(1e4)
    assert evaluate(head, target, store_3, [3]).by_confidence[-1][0] > 0


def test_a_step_waits_for_no_card(target, store):
    """Here for tensors that have no values at all."""
    card = torch.device("meta")
    options = dataclasses.replace(OPTIONS, noise=0.0, self_fed_steps=2)
    target = copy.deepcopy(target).to(card)
    head = new_head_ready(target, options)
    loss = head_loss(
        head, target.head_rows(torch.arange(30)), make_batch(store, [3, 4], card), options, 0
    )
    loss.backward()
    assert loss.is_meta and head.fc.weight.grad.is_meta


def test_noise_is_uniform_to_both_sides_and_reaches_the_loss(target, store):
    options = dataclasses.replace(OPTIONS, noise=0.3)
    batch = make_batch(store, [3, 4, 5], CPU)
    rows = torch.cat([batch.noisy(options, 7)[b, : n + 1] for b, n in enumerate(batch.last)])
    clean = torch.cat([batch.features.float()[b, : n + 1] for b, n in enumerate(batch.last)])
    noise = (rows - clean) / options.noise
    assert len(noise.flatten()) > 1000
    assert noise.min() < -0.98 and noise.max() > 0.98 and noise.abs().max() <= 1 + 1e-4
    first, second = (batch.noisy(options, 7) - batch.features.float())[:2, :4]
    assert not torch.allclose(first, second, atol=0.01), "of each conversation its own"
    assert abs(noise.mean()) < 0.06 and noise.std().item() == pytest.approx(1 / 3**0.5, abs=0.03)
    largest = dataclasses.replace(options, seed=2**63 - 1)
    assert batch.noisy(largest, 7).isfinite().all() and next(batches(store, [3], largest)) == [3]
    head = new_head_ready(target, options)
    lm_rows, none = target.head_rows(torch.arange(30)), dataclasses.replace(options, noise=0.0)
    losses = [head_loss(head, lm_rows, batch, o, s) for o, s in ((options, 7), (options, 8))]
    losses.append(head_loss(head, lm_rows, batch, none, 7))
    assert len({loss.item() for loss in losses}) == 3


def test_rows_that_count(target, store):
    """A row counts if drafting could begin there and the answer goes on after it."""
    batch = make_batch(store, [0, 3], torch.device("cpu"))
    for b, i in enumerate((0, 3)):
        ids, features = store.conversation(i)
        for step in (0, 2):
            rows = batch.counted(step)[b].nonzero()[:, 0].tolist()
            assert rows == list(range(store.conversations[i].prompt_len - 1 + step, len(ids) - 2))
        assert batch.tokens[b, : len(ids) - 1].equal(ids[1:])
        assert batch.targets[b, : len(ids) - 1].equal(features[1:])


def test_batches_cover_everything_once_and_repeat():
    """Of similar lengths, in another order in each epoch, which is not that of the lengths."""
    text = [Conversation([0] * n, 1) for n in range(100, 1700, 40)]
    store, indices = Features(text, 0, list[torch.Tensor]().__getitem__), list(range(3, 40))
    options = dataclasses.replace(OPTIONS, batch_tokens=4100)
    first, again = (batches(store, indices, options) for _ in range(2))
    epochs = []
    for _ in range(2):
        epoch: list[list[int]] = []
        while sum(map(len, epoch)) < len(indices):
            epoch.append(next(first))
            assert epoch[-1] == next(again)
        assert sorted(i for group in epoch for i in group) == indices
        longest = [max(store.lengths[i] for i in group) for group in epoch]
        assert all(len(g) * (n - 60) <= 4100 for g, n in zip(epoch, longest, strict=True))
        assert longest != sorted(longest) and len(epoch) < 30
        epochs.append(epoch)
    first_groups, other_groups = ({frozenset(group) for group in epoch} for epoch in epochs)
    assert first_groups != other_groups, "beside other conversations, too"
