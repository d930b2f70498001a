"""Training a head: what it learns, what it reads, resuming, and wrong options."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.prompts import Conversation
from fasteagle.training.data import cached_features
from fasteagle.training.held_out import HeldOut, evaluate
from fasteagle.training.loss import unroll
from fasteagle.training.options import TrainOptions
from fasteagle.training.parallel import ALONE
from fasteagle.training.train import Trainer, TrainingBar, head_header
from helpers import eagle3_of, random_head
from training_cases import OPTIONS, OPTIONS_3, new_head_ready


def test_held_out_conversations_are_not_trained_on(trainer, store, monkeypatch):
    made, batched = trainer(), []
    monkeypatch.setattr(made, "evaluate", lambda: HeldOut((0.5,), 1.5, 1, tv=(0.5,)))
    read = store.conversation
    monkeypatch.setattr(store, "conversation", lambda i: (batched.append(i), read(i))[1])
    made.run()
    assert set(batched) == set(range(3, len(store))) and set(made.held_out) == {0, 1, 2}


def test_an_unroll_longer_than_every_answer(trainer, target, text, tmp_path):
    """Steps for which no row of the batch counts are left out: the loss is that without them."""
    short = [Conversation(c.ids[: c.prompt_len + 3], c.prompt_len, True) for c in text]
    store = cached_features(Engine(target, 256), short, tmp_path / "short")
    losses = []
    for n in (1, 5):
        made = trainer(dataclasses.replace(OPTIONS, self_fed_steps=n, steps=3), str(n), store)
        made.run(every=1)
        losses += [entry["loss"] for entry in made.history]
    assert losses[:3] == losses[3:] and all(0 < loss < 100 for loss in losses)


LEARNS = [("eagle1", "paper"), ("eagle3", "paper"), ("eagle1", "mixed"), ("eagle3", "lk")]


@pytest.mark.parametrize(("algorithm", "loss"), LEARNS)
def test_training_learns(trainer, target, request, algorithm, loss):
    """Measured on the text it trains on: a random target says nothing one could generalize."""
    options, name = {"eagle1": (OPTIONS, "store"), "eagle3": (OPTIONS_3, "store_3")}[algorithm]
    store = request.getfixturevalue(name)
    n_steps, gain = (150, 0.1) if loss == "paper" else (60, 0.04)
    weights = {"ce_weight": None, "feature_weight": None} if loss == "lk" else {}
    options = dataclasses.replace(options, steps=n_steps, loss=loss, **weights)
    assert loss != "lk" or (options.ce_weight, options.feature_weight) == (1, 0), "it is alone"
    made = trainer(options, store=store)
    made.run(every=n_steps // 3)
    entries = made.history
    assert entries[-1]["step"] == n_steps and len(entries) == 3
    # A loss that is all cross-entropy ends at the entropy of the target.
    share = 0.8 if options.feature_weight else 0.9
    assert entries[-1]["loss"] < share * entries[0]["loss"]
    before = evaluate(new_head_ready(target, options), target, store, made.training)
    after = evaluate(made.head, target, store, made.training)
    assert after.alphas[0] > before.alphas[0] + gain and after.tv[0] < before.tv[0] - 0.02


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
        made.run()
        losses.append(made.history[0]["loss"])
        assert torch.equal(one.embedding.weight, before)
    assert quality[0] != quality[1] and losses[0] != losses[1]


def test_the_options_reach_the_optimizer(trainer, monkeypatch):
    rates = {"beta1": 0.7, "beta2": 0.8, "weight_decay": 0.25, "clip": 0.01}
    options = dataclasses.replace(OPTIONS, steps=8, warmup=2, **rates)
    made, losses = trainer(options), []
    monkeypatch.setattr(TrainingBar, "tick", lambda bar, step, loss: losses.append(loss))
    made.run(every=4)
    (group,) = made.optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.7, 0.8), 0.25)
    assert group["lr"] == options.lr_at(7) < options.lr / 2
    assert [options.lr_at(n) for n in range(2)] == [options.lr / 2, options.lr]
    assert [options.lr_at(n) for n in (8, 99)] == pytest.approx([options.lr / 10] * 2)
    for entry, part in zip(made.history, (losses[:4], losses[4:]), strict=True):
        assert entry["loss"] == pytest.approx(sum(part) / 4, abs=1e-5)
    gradients = [p.grad for p in made.head.parameters() if p.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(0.01, rel=0.01)


def test_a_new_head_begins_as_the_identity_on_the_feature(target):
    """For EAGLE-3 on the last auxiliary hidden state, under the target's norm and LM head."""
    features = torch.randn(1, 12, target.config.dim * 3)
    for options in (OPTIONS, OPTIONS_3):
        head = new_head_ready(target, dataclasses.replace(options, draft_vocab_size=40))
        size, tokens = head.config.feature_dim, torch.arange(12)[None]
        (output,) = unroll(head, head.embedding.weight[tokens], features[..., :size], 1)
        last = features[..., size - target.config.dim : size]
        wanted = target.norm(last) if options is OPTIONS_3 else last
        likeness = torch.cosine_similarity(output, wanted, dim=-1)
        assert likeness.min() > 0.95 and (head.fc.bias is None) == (options is OPTIONS_3)
    assert torch.equal(head.own_lm_head.weight, target.head_rows(torch.arange(40)))
    first, again, other = (
        new_head_ready(target, dataclasses.replace(OPTIONS, seed=seed)).fc.weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("algorithm", ["eagle1", "eagle3", "mtp"])
def test_a_header_names_the_algorithm(target, algorithm):
    eagle3 = eagle3_of(algorithm, target.config)
    head = random_head(target, eagle3=eagle3, mtp=algorithm == "mtp")
    model = SimpleNamespace(name="tiny", checkpoint=SimpleNamespace(scheme=None, fingerprint="1"))
    header = head_header(head, model, 9, HeldOut((0.5,), 1.5, 1).as_dict())
    assert header["algorithm"] == algorithm and header["scheme"] is header["group_size"] is None


@pytest.mark.parametrize("self_fed", [0, 2])
def test_a_run_that_was_cut_off_continues_exactly(trainer, self_fed):
    options = dataclasses.replace(OPTIONS, steps=12, self_fed_steps=self_fed)
    whole = trainer(options, folder="a")
    whole.run(every=100)

    class Killed(Exception):
        pass

    part = trainer(options, folder="b")
    original = part._update

    def update(batch):
        if part.step == 8:
            raise Killed
        return original(batch)

    part._update = update
    with pytest.raises(Killed):
        part.run(every=100, save_every=3)
    rest = trainer(options, folder="b")
    assert rest.resume() and rest.step == 6
    rest.run(every=100)
    for a, b in zip(whole.head.parameters(), rest.head.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("lr", "held_out", "identity", "message"),
    [
        (1e-4, [0, 1, 2], "", r"other settings \(lr 0.003 -> 0.0001\)"),
        (3e-3, [0, 1], "", "another model or other text"),
        (3e-3, [0, 1, 2], "other text", "another model or other text"),
    ],
)
def test_resuming_another_run_is_refused(trainer, lr, held_out, identity, message):
    options = dataclasses.replace(OPTIONS, steps=3)
    trainer(options).run()
    options = dataclasses.replace(options, lr=lr)
    other = trainer(options, held_out=held_out, identity=identity)
    with pytest.raises(FasteagleError, match=message):
        other.resume()


def test_a_full_disk_costs_one_line_and_keeps_the_old_checkpoint(trainer, tmp_path, monkeypatch):
    made = trainer()
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


def test_a_checkpoint_that_is_none_costs_one_line(trainer, tmp_path):
    """It is read as weights of strangers are: no code in it runs."""
    made = trainer()
    made.save()
    state, remedy = tmp_path / "run" / "state.pt", "remove it, or give another --out"
    for content in (pickle.dumps(tmp_path), b""):  # an object of a class, and a full disk's file
        state.write_bytes(content)
        with pytest.raises(
            FasteagleError, match=rf"(not a weights-only torch file .*|is empty: ){remedy}"
        ):
            made.resume()
    for content in ({"head": {}}, [1]):
        torch.save(content, state)
        with pytest.raises(FasteagleError, match=rf"is no state of a training: {remedy}"):
            made.resume()


def test_gradients_that_are_not_finite_change_no_weight(trainer):
    """Where the loss still is: clipping would make NaN of them all."""
    made = trainer(dataclasses.replace(OPTIONS, steps=1))
    before, weight = made.head.fc.weight.detach().clone(), made.head.fc.weight
    weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(FasteagleError, match="the loss is not finite at step 1"):
        made.run()
    assert torch.equal(weight, before)


def test_a_run_that_diverges_costs_one_line_and_keeps_its_checkpoint(
    trainer, tmp_path, monkeypatch
):
    made = trainer(dataclasses.replace(OPTIONS, steps=9))
    state = tmp_path / "run" / "state.pt"

    def spoil(bar, step, loss):
        if step == 3:
            made.head.fc.weight.data[0, 0] = float("nan")

    monkeypatch.setattr(TrainingBar, "tick", spoil)
    with pytest.raises(FasteagleError, match="the loss is not finite at step 4: give a lower --lr"):
        made.run(every=100, save_every=2)
    assert torch.load(state, weights_only=True)["step"] == 2
    with pytest.raises(FasteagleError, match="the draft head predicts no finite numbers"):
        made.evaluate()


def test_work_is_saved_by_the_clock_too(trainer, monkeypatch):
    monkeypatch.setattr("fasteagle.training.train.SAVE_SECONDS", 0.0)
    made, saved = trainer(dataclasses.replace(OPTIONS, steps=3)), []
    monkeypatch.setattr(made, "save", lambda: saved.append(made.step))
    made.run(every=100, save_every=100)
    assert saved == [1, 2, 3]


def test_the_rate_is_that_since_the_last_evaluation(trainer, monkeypatch):
    """Without the time that evaluations take themselves."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("fasteagle.training.train.time", clock)
    made = trainer(dataclasses.replace(OPTIONS, steps=4))

    def update(batch):
        now[0] += 2.0
        return 0.5, 100

    def evaluate():
        now[0] += 6.0
        return HeldOut((0.5,), 1.5, 1, tv=(0.5,))

    monkeypatch.setattr(made, "evaluate", evaluate)
    monkeypatch.setattr(made, "_update", update)
    made.run(every=2, save_every=100)
    assert [entry["tok_s"] for entry in made.history] == [50, 50]


def test_the_line_of_an_evaluation(capsys):
    held = HeldOut((0.5, 0.25), 1.625, 9, tv=(0.75, 0.875)).as_dict()
    entry = {"step": 10, "loss": 0.5, "tok_s": 1234, **held}
    TrainingBar(SimpleNamespace(options=OPTIONS, step=0, ranks=ALONE)).report(entry)
    line = "step 10 of 30 | loss 0.5000 | n-alpha 0.500 0.250 | tau 1.62 | TV 0.750 | 1,234 tok/s"
    assert capsys.readouterr().err == f"{line}\n"


def test_training_stops_when_held_out_text_gains_nothing(trainer):
    made = trainer(dataclasses.replace(OPTIONS, lr=1e-12))
    made.run(every=2, patience=3)
    assert made.step == 8


@pytest.mark.parametrize("aux_layers", [(2, 1), (1, 4), (-1, 2)])
def test_aux_layers_that_the_model_lacks(aux_layers):
    with pytest.raises(FasteagleError, match="must ascend within 0 .. 3"):
        TrainOptions(algorithm="eagle3", tap_layers=aux_layers).aux_layers_of(3)
