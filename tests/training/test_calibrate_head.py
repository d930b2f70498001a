"""`fasteagle calibrate-head`: its options, a run that was cut off, what it keeps."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.open import OpenedModel
from fasteagle.prompts import Conversation, read_conversations
from fasteagle.training import calibrate_head
from fasteagle.training.held_out import HeldOut
from fasteagle.training.train import Trainer
from head_files import load_head
from helpers import (
    TINY_VOCAB,
    eagle3_of,
    edit_json,
    invoke,
    raising,
    random_head,
    random_target,
    save_tiny,
    tiny_config,
    write_random_text,
)


def written(folder, algorithm="eagle1"):
    """A tiny model and a random head for it."""
    sizes = {"intermediate_size": 128, "num_hidden_layers": 1}  # one layer is compiled sooner
    folder = save_tiny(folder / "model", "llama3", **sizes)
    model = load_model(open_checkpoint(folder), dtype=torch.float32, device="cpu", max_seq_len=64)
    eagle3 = eagle3_of(algorithm, model.config)
    own = {"rope_scaling": None, "rope_base": 10000.0, "eagle3": eagle3}
    head = random_head(model, torch.arange(0, 260, 2), **own)
    save_head(folder.parent / "head", head, {}, torch.float32)
    return folder, folder.parent / "head"


@pytest.fixture
def text(tmp_path):
    return write_random_text(tmp_path / "text.jsonl", 32, 40)


def calibrate(folder, head, out, *more):
    model = ("--model", folder, "--precision", "int4-g32-aten", "--max-seq-len", 384)
    return ("calibrate-head", *model, "--head", head, "--out", out, *more)


def report_of(out):
    return json.loads((out / "calibration.json").read_text())


class Cut(BaseException):
    """Ends a run like a kill: nothing catches it."""


def test_a_run_that_was_cut_off_goes_on_and_chat_finds_the_head(
    text, tmp_path, monkeypatch, no_compiler
):
    folder, head = written(tmp_path)
    out, work = tmp_path / "out", tmp_path / "out.calibrating"
    command = calibrate(folder, head, out, "--data", text, "--steps", 6)
    monkeypatch.setattr(calibrate_head, "SAVE_EVERY", 4)
    save = Trainer.save

    def save_and_end(self):
        save(self)
        raise Cut

    with monkeypatch.context() as patched, pytest.raises(Cut):
        patched.setattr(Trainer, "save", save_and_end)
        invoke(*command)
    assert torch.load(work / "run" / "state.pt", weights_only=True)["step"] == 4
    again = invoke(*command)
    assert again.exit_code == 2 and "continue it with --resume" in again.stderr
    other = invoke(*command, "--resume", "--draft-vocab", 100)
    assert other.exit_code == 2 and "other settings (draft_vocab None -> 100)" in other.stderr
    config = (head / "config.json").read_text()
    edit_json(head / "config.json", rope_theta=5e5)
    other = invoke(*command, "--resume")
    assert other.exit_code == 2 and "other settings (head_digest " in other.stderr
    (head / "config.json").write_text(config)
    state = json.loads((work / "state.json").read_text())
    assert state["results"] == {"steps": 6}
    whole = json.dumps({**state, "spent": 6000.0})
    odd = '{"key": 5, "results": [], "spent": "x"}'
    for damaged, what in (
        (whole[:-9], "cannot be read as JSON"),
        ("{}", "no state of a"),
        (odd, "no state of a"),
    ):
        (work / "state.json").write_text(damaged)
        refused = invoke(*command, "--resume")
        assert refused.exit_code == 2 and what in refused.stderr, refused.stderr
    (work / "state.json").write_text(whole)
    done = invoke(*command, "--resume")
    assert done.exit_code == 0, done.stderr
    assert "step 6 of 6" in done.stderr and "step 3 of 6" not in done.stderr
    assert not work.exists()
    report = report_of(out)
    assert report["steps"] == 6 and 100 <= report["minutes"] < 120
    assert report["header"]["scheme"] == "int4-g32-minmax"
    taus = [report[stage]["tau"] for stage in ("before", "distilled")]
    assert report["distilled"]["kept"] == (taus[1] > taus[0])
    assert report["header"]["tau"] == max(taus)
    model = ("--model", folder, "--precision", "int4-g32-aten")
    chat = ("chat", *model, "--head", out, "-p", "hi", "--max-new-tokens", 4, "--max-seq-len", 128)
    said = invoke(*chat)
    assert said.exit_code == 0 and "warning" not in said.stderr, said.stderr


def test_a_run_that_was_cut_off_while_its_head_was_written_goes_on(
    text, tmp_path, monkeypatch, no_compiler
):
    folder, head = written(tmp_path)
    command = calibrate(folder, head, tmp_path / "out", "--data", text, "--steps", 1)
    for written_last in (calibrate_head.save_head, calibrate_head.write_json):

        def write_and_end(out, *more, write=written_last):
            write(out, *more)
            if out.is_relative_to(tmp_path / "out"):
                raise Cut

        with monkeypatch.context() as patched, pytest.raises(Cut):
            patched.setattr(calibrate_head, written_last.__name__, write_and_end)
            invoke(*command, "--resume")
    done = invoke(*command, "--resume")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "out" / "config.json").exists() and report_of(tmp_path / "out")


def test_what_is_there_is_not_written_over(text, tmp_path, no_compiler):
    folder, head = written(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused = invoke(*calibrate(folder, head, folder, "--data", text, "--steps", 1))
    assert refused.exit_code == 2 and "holds a model or a head" in refused.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    notes = tmp_path / "out.calibrating" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    refused = invoke(*calibrate(folder, head, tmp_path / "out", "--data", text, "--steps", 1))
    assert refused.exit_code == 2 and "is no folder of a calibration" in refused.stderr
    assert notes.read_text() == "mine" and not (tmp_path / "out").exists()
    refused = invoke(*calibrate(folder, head, tmp_path / "out", "--data", "/dev/null"))
    assert refused.exit_code == 2 and "/dev/null is a pipe or a device: give" in refused.stderr
    refused = invoke(*calibrate(folder, head, "/", "--data", text, "--steps", 1))
    assert refused.exit_code == 2 and "no place for a head" in refused.stderr


@pytest.mark.parametrize(("algorithm", "is_better"), [("eagle1", True), ("eagle3", False)])
def test_only_a_better_head_is_kept(algorithm, is_better, text, tmp_path, monkeypatch, no_compiler):
    tau, trained = 9.0 if is_better else 0.5, []

    def evaluate(self):
        trained.append(self.options.algorithm)
        return HeldOut((0.5,), 1.0 if len(trained) == 1 else tau, 10, tv=(0.5,))

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    folder, head = written(tmp_path, algorithm)
    out = tmp_path / "out"
    (tmp_path / "text.jsonl.settings.json").write_text('{"model": "b", "fingerprint": "0"}')
    more = ("--data", text, "--steps", 2, "--draft-vocab", 100)
    done = invoke(*calibrate(folder, head, out, *more))
    assert done.exit_code == 0, done.stderr
    assert "text.jsonl was written by 'b', not by" in done.stderr
    report = report_of(out)
    assert report["distilled"]["kept"] is is_better
    assert (report["header"]["tau"] == tau) is is_better
    assert report["header"]["algorithm"] == algorithm and set(trained) == {algorithm}
    assert report["header"]["training_tokens"] == (32 - 8) * 40, "without those held out"
    config = open_checkpoint(folder).config
    first, calibrated = (load_head(path, config)[0] for path in (head, out))
    assert len(calibrated.target_ids()) == 100 == report["header"]["draft_vocab_size"]
    rounded = first.fc.weight.to(torch.bfloat16).float()
    assert torch.equal(calibrated.fc.weight.float(), rounded) is not is_better


def test_a_new_vocabulary_keeps_the_rows_that_it_can():
    """An LM head of the head's own: known tokens keep their rows, new ones get the target's."""
    target = random_target(tiny_config(dim=64, n_head=4, head_dim=16, ffn_dim=96))
    head = random_head(target, torch.arange(20, 40), eagle3=eagle3_of("eagle3", target.config))
    said = [Conversation([1, 2, 50, 50, 51, 52, 50], 2)]
    rebuilt = calibrate_head.with_draft_vocab(head, said, target, 12)
    ids = rebuilt.target_ids().tolist()
    assert ids == [*range(20, 29), 50, 51, 52]
    for draft_id, token in enumerate(ids):
        row = rebuilt.own_lm_head.weight[draft_id]
        if token >= 50:
            assert torch.equal(row, target.lm_head.weight[token])
        else:
            assert torch.equal(row, head.own_lm_head.weight[token - 20])
    assert calibrate_head.with_draft_vocab(head, said, target, None) is head


def test_without_time_the_least_is_done_on_text_of_its_own(tmp_path, monkeypatch, no_compiler):
    monkeypatch.setattr(calibrate_head, "ANSWER_TOKENS", 16)
    monkeypatch.setattr(calibrate_head, "FEWEST_STEPS", 4)
    texts = []

    def read(path, *more):
        texts.append([c.ids for c in read_conversations(path, *more)])
        return read_conversations(path, *more)

    monkeypatch.setattr(calibrate_head, "read_conversations", read)
    save, places = Trainer.save, []
    monkeypatch.setattr(Trainer, "save", lambda self: (places.append(self.folder), save(self)))
    folder, head = written(tmp_path)
    often = [*range(0, 256, 10), TINY_VOCAB - 1]  # tokens that end a text
    edit_json(folder / "generation_config.json", eos_token_id=often)
    out = tmp_path / "out"
    done = invoke(*calibrate(folder, head, out, "--minutes", 0.001))
    assert done.exit_code == 0, done.stderr
    work = tmp_path / "out.calibrating"  # on a disk that has room for the optimizer's state
    assert places and all(work in place.parents for place in places)
    assert len(texts[0]) == calibrate_head.MIN_CONVERSATIONS
    assert report_of(out)["steps"] == calibrate_head.FEWEST_STEPS
    assert max(map(max, texts[0])) < TINY_VOCAB


def test_half_of_the_time_is_for_text_and_the_rest_for_steps(
    text, tmp_path, monkeypatch, no_compiler
):
    now, enough, steps = [0.0], [], []
    monkeypatch.setattr(calibrate_head.Work, "seconds", property(lambda work: now[0]))
    monkeypatch.setattr(Trainer, "seconds_a_step", lambda trainer: 0.1)

    def write_text(target, data, is_enough):
        for n, now[0] in ((24, 59.0), (23, 61.0), (24, 61.0)):
            enough.append(is_enough(n))
        shutil.copy(text, data.out)

    def run(trainer, *rest, **more):
        steps.append(trainer.options.steps)
        raise FasteagleError("seen")

    monkeypatch.setattr(calibrate_head, "write_text", write_text)
    monkeypatch.setattr(Trainer, "run", run)
    invoke(*calibrate(*written(tmp_path), tmp_path / "out", "--minutes", 2))
    assert enough == [False, False, True] and steps == [int((120 - 61) / 0.13)]


def test_by_default_for_the_weights_that_chat_runs(text, tmp_path, monkeypatch, no_compiler):
    """Those of the file where it is quantized, else int4."""
    monkeypatch.setattr(calibrate_head, "_text", raising(FasteagleError("seen")))
    folder, head = written(tmp_path)
    for own, scheme, time in ((None, "int4-g64-hqq", "2 minutes"), ("int8", "int8", "1 minute")):
        monkeypatch.setattr(OpenedModel, "quant_of", lambda _, o, own=own: o.quant or own)
        done = invoke("calibrate-head", "--model", folder, "--head", head, "--minutes", time[0])
        assert f"at {scheme}: about {time}\n" in done.stderr, done.stderr


def test_memory_that_runs_out_is_told_in_a_line(text, tmp_path, monkeypatch, no_compiler):
    monkeypatch.setattr(Trainer, "run", raising(torch.OutOfMemoryError("CUDA out of memory")))
    (tmp_path / "out").mkdir()  # with a head of an earlier calibration, which may be replaced
    for name in ("calibration.json", "config.json", "model.safetensors"):
        (tmp_path / "out" / name).write_text("{}")
    done = invoke(*calibrate(*written(tmp_path), tmp_path / "out", "--data", text, "--steps", 2))
    assert done.exit_code == 2, done.output
    assert "out of memory while calibrating" in done.stderr and "--max-seq-len" in done.stderr
