"""Training a head: the loss, the simulation of drafting, resuming, and wrong text."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.prompts import Conversation
from fasteagle.shapes import TreeShape
from fasteagle.training.data import FeatureStore, LiveFeatures, compute_features
from fasteagle.training.held_out import HeldOut, draft_rows, evaluate
from fasteagle.training.loss import SoftCrossEntropy, batches, head_loss, make_batch, unroll
from fasteagle.training.options import TrainOptions
from fasteagle.training.parallel import Ranks
from fasteagle.training.train import Trainer, new_head
from helpers import (
    OPTIONS,
    OPTIONS_3,
    eagle3_of,
    pairs,
    random_head,
    random_target,
    talk,
    tiny_config,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return random_target(tiny_config())


@pytest.fixture(scope="module")
def text(target):
    return talk(target)


@pytest.fixture
def store(target, text, tmp_path) -> FeatureStore:
    return compute_features(Engine(target, 256), text, tmp_path / "features")


@pytest.fixture
def store_3(target, text, tmp_path) -> FeatureStore:
    """With the auxiliary hidden states that an EAGLE-3 head reads."""
    layers = OPTIONS_3.aux_layers_of(target.config.n_layer)
    return compute_features(Engine(target, 256), text, tmp_path / "taps", aux_layers=layers)


def trainer(target, store, folder, options=OPTIONS) -> Trainer:
    head = new_head(target, torch.arange(40), options)
    loss_ids = torch.arange(options.loss_vocab_size)
    return Trainer(head, target, store, [0, 1, 2], loss_ids, options, folder)


# The simulation of drafting


def head_at_work(head) -> HeadDrafter:
    """A head with an empty cache of 256 slots."""
    drafter = EagleDrafter(head, TreeShape(), 256)
    drafter.reserve(240)
    return drafter


@pytest.mark.parametrize("algorithm", ["eagle1", "eagle3"])
@torch.no_grad()
def test_unrolled_steps_equal_drafting_with_the_cache(target, algorithm):
    """Each row's s-th prediction equals that of the head fed its own features s times."""
    head = random_head(target, eagle3=eagle3_of(algorithm, target.config))
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


@torch.no_grad()
def test_simulated_acceptance_equals_what_the_engine_measures(target, store, tmp_path):
    """Chains drafted at every position of greedy text, by hand, against `evaluate`."""
    made = trainer(target, store, tmp_path / "run", dataclasses.replace(OPTIONS, steps=120))
    with torch.enable_grad():
        made.run(lambda entry: None, every=200)
    head = made.head
    held = evaluate_fp32(head, target, store, list(range(3, 9)))
    tried, accepted = [0] * 5, [0] * 5
    drafted: list[tuple[float, bool]] = []  # confidence of each child, and whether it is right
    for i in range(3, 9):
        ids, features = store.conversation(i)
        features = features.float()
        for root in range(store.prompt_lens[i], len(ids) - 1):
            drafter, seq_len = head_at_work(head), torch.tensor(root)
            known = pairs(ids[1 : root + 1], features[:root])
            (logits, feature), step = drafter.extend(known, seq_len), 0
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


def test_several_processes_evaluate_a_part_of_the_conversations_each(target, store, tmp_path):
    made = trainer(target, store, tmp_path / "run", dataclasses.replace(OPTIONS, steps=40))
    made.run(lambda entry: None, every=40)
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


def evaluate_fp32(head, target, store, indices):
    """`evaluate` without bf16 rounding, which could turn a tie."""
    import contextlib

    from fasteagle.training import held_out

    original = held_out.autocast
    held_out.autocast = lambda device: contextlib.nullcontext()
    try:
        return evaluate(head, target, store, indices)
    finally:
        held_out.autocast = original


@pytest.mark.parametrize("has_own", [False, True])
def test_soft_cross_entropy_and_its_gradient(has_own):
    """Also of a head with an LM head of its own, whose rows are trained."""
    g = torch.Generator().manual_seed(0)
    p, own = (torch.randn(n, 16, generator=g, requires_grad=True) for n in (700, 50))
    t, rows = torch.randn(700, 16, generator=g), torch.randn(50, 16, generator=g)
    drafting, trained = (own, (p, own)) if has_own else (rows, (p,))
    loss = SoftCrossEntropy.apply(p, t, rows, own if has_own else None)
    ours = torch.autograd.grad(3 * loss, trained)
    wanted = (t @ rows.T).softmax(-1)
    expected = -(wanted * (p @ drafting.T).log_softmax(-1)).sum(-1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for gradient, exact in zip(ours, torch.autograd.grad(3 * expected, trained), strict=True):
        assert torch.allclose(gradient, exact, atol=1e-6)


@pytest.mark.parametrize(
    ("ce_weight", "feature_weight"), [(0.1, 1.0), (2.0, 0.0), (0.5, 3.0), (0.0, 1.0)]
)
def test_the_loss_is_the_weighted_sum_of_its_two_terms(target, store, ce_weight, feature_weight):
    options = dataclasses.replace(
        OPTIONS, noise=0.0, ce_weight=ce_weight, feature_weight=feature_weight
    )
    head = new_head(target, torch.arange(40), options)
    head.borrow(target, 256)
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


def test_noise_is_uniform_to_both_sides_and_reaches_the_loss(target, store):
    options = dataclasses.replace(OPTIONS, noise=0.3)
    batch = make_batch(store, [3, 4, 5], CPU)
    rows = torch.cat([batch.noisy(options, 7)[b, : n + 1] for b, n in enumerate(batch.last)])
    clean = torch.cat([batch.features.float()[b, : n + 1] for b, n in enumerate(batch.last)])
    noise = (rows - clean) / options.noise
    assert len(noise.flatten()) > 1000
    assert noise.min() < -0.98 and noise.max() > 0.98 and noise.abs().max() <= 1 + 1e-4
    assert abs(noise.mean()) < 0.06 and noise.std().item() == pytest.approx(1 / 3**0.5, abs=0.03)
    head = new_head(target, torch.arange(40), options)
    head.borrow(target, 256)
    lm_rows, none = target.head_rows(torch.arange(30)), dataclasses.replace(options, noise=0.0)
    losses = [head_loss(head, lm_rows, batch, o, s) for o, s in ((options, 7), (options, 8))]
    losses.append(head_loss(head, lm_rows, batch, none, 7))
    assert len({loss.item() for loss in losses}) == 3


def test_held_out_conversations_are_not_trained_on(target, store, tmp_path, monkeypatch):
    made, batched = trainer(target, store, tmp_path / "run"), []
    monkeypatch.setattr(made, "evaluate", lambda: HeldOut((0.5,), 1.5, 1))
    read = store.conversation
    monkeypatch.setattr(store, "conversation", lambda i: (batched.append(i), read(i))[1])
    made.run(lambda entry: None)
    assert set(batched) == set(range(3, len(store))) and set(made.held_out) == {0, 1, 2}


def test_live_features_train_the_same_head(target, store, tmp_path):
    live = LiveFeatures(Engine(target, 256), talk(target))
    heads = []
    for source in (store, live):
        made = trainer(target, source, tmp_path / type(source).__name__)
        made.run(lambda entry: None)
        heads.append(made.head.state_dict())
        assert [list(e["alphas"]) for e in made.history]
    for name, cached in heads[0].items():
        assert torch.allclose(cached, heads[1][name], atol=2e-3), name


def test_an_unroll_longer_than_every_answer(target, tmp_path):
    """Steps for which no row of the batch counts are left out, and the loss stays finite."""
    short = [Conversation(c.ids[: c.prompt_len + 3], c.prompt_len, True) for c in talk(target)]
    store = compute_features(Engine(target, 256), short, tmp_path / "features")
    options = dataclasses.replace(OPTIONS, self_fed_steps=5, steps=3)
    made = trainer(target, store, tmp_path / "run", options)
    losses = []
    made.run(lambda entry: None, tick=lambda step, loss: losses.append(loss))
    assert len(losses) == 3 and all(0 < loss < 100 for loss in losses)


def test_rows_that_count(target, store):
    """A row counts if drafting could begin there and the answer goes on behind it."""
    batch = make_batch(store, [0, 3], torch.device("cpu"))
    for b, i in enumerate((0, 3)):
        ids, features = store.conversation(i)
        for step in (0, 2):
            rows = batch.counted(step)[b].nonzero()[:, 0].tolist()
            assert rows == list(range(store.prompt_lens[i] - 1 + step, len(ids) - 2))
        assert batch.tokens[b, : len(ids) - 1].equal(ids[1:])
        assert batch.targets[b, : len(ids) - 1].equal(features[1:])


def test_batches_cover_everything_once_and_repeat(store):
    indices = list(range(3, len(store)))
    first = batches(store, indices, OPTIONS)
    seen: list[int] = []
    while len(seen) < len(indices):
        seen += next(first)
    assert sorted(seen) == indices
    again = batches(store, indices, OPTIONS)
    assert next(again) == next(batches(store, indices, OPTIONS))


# Training


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS_3], ids=["eagle1", "eagle3"])
def test_training_learns(target, store, store_3, tmp_path, options):
    """Measured on the text it trains on: a random target says nothing one could generalize."""
    store = store_3 if options is OPTIONS_3 else store
    made = trainer(target, store, tmp_path / "run", dataclasses.replace(options, steps=150))
    entries = []
    made.run(entries.append, every=50)
    assert entries[-1]["step"] == 150 and len(entries) == 3
    # EAGLE-3's loss is all cross-entropy, which ends at the entropy of the target.
    share = 0.9 if options is OPTIONS_3 else 0.8
    assert entries[-1]["loss"] < share * entries[0]["loss"]
    before = evaluate(new_head_ready(target, options), target, store, made.training)
    after = evaluate(made.head, target, store, made.training)
    assert after.alphas[0] > before.alphas[0] + 0.1


def test_an_embedding_of_its_own_is_read_and_stays(target, store_3, tmp_path):
    """Of an EAGLE-3 head: in training and where it is measured, as in drafting."""
    own = eagle3_of("eagle3", target.config, own_embedding=True, own_lm_head=True)
    head = random_head(target, eagle3=own)
    same = copy.deepcopy(head)
    same.own_embedding.weight.copy_(target.embedding.weight)
    options = dataclasses.replace(OPTIONS_3, steps=3)
    ids, quality, losses = torch.arange(target.config.vocab_size), [], []
    for number, one in enumerate((head, same)):
        one.requires_grad_(True)
        made = Trainer(one, target, store_3, [0, 1, 2], ids, options, tmp_path / str(number))
        quality.append(evaluate(one, target, store_3, [3, 4, 5]).by_confidence)
        before = one.embedding.weight.clone()
        made.run(lambda entry: losses.append(entry["loss"]), every=3)
        assert torch.equal(one.embedding.weight, before)
    assert quality[0] != quality[1] and losses[0] != losses[1]


def new_head_ready(target, options):
    head = new_head(target, torch.arange(40), options)
    head.borrow(target, 256)
    return head


@pytest.mark.parametrize("self_fed", [0, 2])
def test_a_run_that_was_cut_off_continues_exactly(target, store, tmp_path, self_fed):
    options = dataclasses.replace(OPTIONS, steps=12, self_fed_steps=self_fed)
    whole = trainer(target, store, tmp_path / "a", options)
    whole.run(lambda entry: None, every=100)

    class Killed(Exception):
        pass

    part = trainer(target, store, tmp_path / "b", options)
    original = part._update

    def update(batch):
        if part.step == 8:
            raise Killed
        return original(batch)

    part._update = update
    with pytest.raises(Killed):
        part.run(lambda entry: None, every=100, save_every=3)
    rest = trainer(target, store, tmp_path / "b", options)
    assert rest.resume() and rest.step == 6
    rest.run(lambda entry: None, every=100)
    for a, b in zip(whole.head.parameters(), rest.head.parameters(), strict=True):
        assert torch.equal(a, b)


def test_resuming_with_other_options_is_refused(target, store, tmp_path):
    made = trainer(target, store, tmp_path / "run", dataclasses.replace(OPTIONS, steps=3))
    made.run(lambda entry: None)
    other = trainer(target, store, tmp_path / "run", dataclasses.replace(OPTIONS, steps=3, lr=1e-4))
    with pytest.raises(FasteagleError, match=r"other options \(lr 0.003 -> 0.0001\)"):
        other.resume()


def test_resuming_with_other_text_is_refused(target, store, tmp_path):
    made = trainer(target, store, tmp_path / "run", dataclasses.replace(OPTIONS, steps=3))
    made.run(lambda entry: None)
    head = new_head(target, torch.arange(40), OPTIONS)
    for held_out, identity in (([0, 1], ""), ([0, 1, 2], "other text")):
        options = dataclasses.replace(OPTIONS, steps=3)
        ids = torch.arange(30)
        other = Trainer(head, target, store, held_out, ids, options, tmp_path / "run", identity)
        with pytest.raises(FasteagleError, match="another model or other text"):
            other.resume()


def test_a_full_disk_costs_one_line_and_keeps_the_old_checkpoint(
    target, store, tmp_path, monkeypatch
):
    made = trainer(target, store, tmp_path / "run")
    made.step = 7
    made.save()

    def full(state, path):
        path.write_bytes(b"half of it")
        raise RuntimeError("PytorchStreamWriter failed writing file: no space left")

    monkeypatch.setattr(torch, "save", full)
    made.step = 8
    with pytest.raises(FasteagleError, match=r"cannot write .*state\.pt .*no space left"):
        made.save()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["state.pt"]
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["step"] == 7


def test_training_stops_when_held_out_text_gains_nothing(target, store, tmp_path):
    made = trainer(target, store, tmp_path / "run", dataclasses.replace(OPTIONS, lr=1e-12))
    made.run(lambda entry: None, every=2, patience=3)
    assert made.step == 8


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": 0}, "lr 0"),
        ({"steps": 0}, "steps 0"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0"),
        ({"self_fed_steps": -1}, "self_fed_steps -1"),
        ({"noise": -0.1}, "noise -0.1"),
        ({"tap_layers": (1, 2, 3)}, "--tap-layers and --borrow-lm-head are for EAGLE-3"),
    ],
)
def test_options_out_of_range(wrong, message):
    with pytest.raises(FasteagleError, match=message):
        TrainOptions(**wrong)


@pytest.mark.parametrize(
    ("layers", "message"), [((2, 1), "must ascend within 0 .. 3"), ((1, 4), "must ascend")]
)
def test_aux_layers_that_the_model_lacks(layers, message):
    with pytest.raises(FasteagleError, match=message):
        TrainOptions(algorithm="eagle3", tap_layers=layers).aux_layers_of(3)
