"""`fasteagle train-head`: a killed run, answered prompts, the bar, and bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.paths import cache_dir, only_writer
from fasteagle.prompts import read_conversations
from fasteagle.training import train_head as module
from fasteagle.training.options import TrainOptions
from fasteagle.training.train import Trainer
from head_files import load_head
from helpers import edit_json, invoke, random_target, tiny_config, write_random_text


@pytest.fixture
def text_file(tiny_dir, tmp_path):
    return write_random_text(tmp_path / "text.jsonl", 30, 30)


def command(tiny_dir, text_file, out, *more):
    options = ("--held-out", 4, "--batch-tokens", 200, "--lr", 1e-3)
    sizes = ("--draft-vocab-size", 128)
    if "--algorithm" not in more:  # an EAGLE-3 head's loss is over all that it drafts
        sizes += ("--loss-vocab-size", 64)
    files = ("--model", tiny_dir, "--data", text_file, "--out", out)
    return ("train-head", *files, *options, *sizes, *more)


def test_the_command_survives_a_kill_and_writes_a_head(tiny_dir, text_file, tmp_path, compiled):
    out = tmp_path / "head"
    train = command(tiny_dir, text_file, out, "--steps", 60, "--every", 25)
    kill_at_first_save(*train, compiled=compiled)
    assert torch.load(out / "state.pt", weights_only=True)["step"] == 50
    again = invoke(*train)
    assert again.exit_code == 2 and "unfinished run: continue it with --resume" in again.stderr
    other = invoke(*train, "--resume", "--precision", "int8-aten")
    assert other.exit_code == 2 and "begun with another model or other text" in other.stderr
    done = invoke(*train, "--resume")
    assert done.exit_code == 0, done.stderr
    assert "continuing at step 50" in done.stderr and "0-alpha" in done.stderr
    files = {"config.json", "model.safetensors", "training.json"}
    assert {path.name for path in out.iterdir()} == files
    checkpoint = open_checkpoint(tiny_dir)
    head, header = load_head(out, checkpoint.config)
    assert header["target_fingerprint"] == checkpoint.fingerprint
    assert header["draft_vocab_size"] == 128 == len(head.target_ids())
    weights = "--self-fed-steps 0 --noise 0.1 --ce-weight 0.1 --feature-weight 1.0"
    assert header["recipe"] == f"--loss paper {weights} --lr 0.001 --batch-tokens 200 --seed 0"
    shown = invoke("inspect-head", out)
    assert f"training          {header['recipe']}" in shown.stdout
    record = json.loads((out / "training.json").read_text())
    assert record["options"]["steps"] == 60 and record["command"].split()[0] == "fasteagle"
    assert [entry["step"] for entry in record["history"]] == [25, 50, 60]


def test_an_eagle3_head_is_trained_and_drafts(
    tiny_dir, text_file, tmp_path, no_compiler, monkeypatch
):
    out = tmp_path / "head"
    kind = ("--algorithm", "eagle3.1", "--tap-layers", "0,1,2", "--self-fed-steps", 1)
    kind += ("--window", 40)
    done = invoke(*command(tiny_dir, text_file, out, *kind, "--steps", 4, "--max-len", 25))
    assert done.exit_code == 0, done.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["tap_layers"] == [0, 1, 2] and config["draft_vocab_size"] == 128
    assert config["layer_types"] == ["sliding_attention"] and config["sliding_window"] == 40
    head, _ = load_head(out, open_checkpoint(tiny_dir).config)
    assert head.config.eagle3.norm_output and head.config.eagle3.aux_norm == "each"
    assert json.loads((out / "training.json").read_text())["header"]["algorithm"] == "eagle3"
    chat = ("chat", "--model", tiny_dir, "--precision", "fp32", "-p", "hi", "--max-new-tokens", 8)
    answers = [invoke(*chat, *more) for more in (("--head", out), ("--no-spec",))]
    assert answers[0].exit_code == 0 and "warning" not in answers[0].stderr, answers[0].stderr
    assert answers[0].stdout == answers[1].stdout
    header = json.loads((out / "training.json").read_text())["header"]
    assert header["scheme"] is None
    assert header["training_tokens"] == 26 * 25, "those of conversations that are not held out"
    begun = ("--init", out, "--steps", 2)
    for options, missing in (
        ((), "give its --algorithm and its --tap-layers"),
        ((*kind, "--borrow-lm-head"), "give no --borrow-lm-head"),
        (("--algorithm", "eagle3", *kind[2:]), "give its --algorithm and its --tap-layers"),
    ):
        other = invoke(*command(tiny_dir, text_file, tmp_path / "more", *begun, *options))
        assert other.exit_code == 2 and missing in other.stderr, other.stderr
    bare = shutil.copytree(out, tmp_path / "bare")
    edit_json(bare / "config.json", norm_output=False)
    other = invoke(*command(tiny_dir, text_file, tmp_path / "more", "--init", bare, *kind))
    assert other.exit_code == 2 and "of another kind" in other.stderr, other.stderr
    evaluate, taus = Trainer.evaluate, itertools.count(2.0)
    monkeypatch.setattr(
        Trainer, "evaluate", lambda self: dataclasses.replace(evaluate(self), tau=next(taus))
    )
    # An evaluation without gain is enough; the window may be another one.
    more = (*kind, "--window", 33, "--init", out, "--every", 1, "--patience", 1, "--lr", 1e-12)
    more = invoke(*command(tiny_dir, text_file, tmp_path / "more", *more, "--steps", 9))
    assert more.exit_code == 0, more.stderr
    assert json.loads((tmp_path / "more" / "config.json").read_text())["sliding_window"] == 33
    record = json.loads((tmp_path / "more" / "training.json").read_text())
    assert record["header"]["steps"] == 2 == len(record["history"])
    assert record["header"]["tau"] == 3.0, "of the head as it is written"


def test_a_head_to_begin_from_keeps_its_draft_vocabulary(
    tiny_dir, text_file, tmp_path, no_compiler
):
    """Unless a size is given; the loss is over ids that it drafts."""
    first, other = tmp_path / "first", write_random_text(tmp_path / "other.jsonl", 30, 25)
    large = ("--lr", 0.1, "--warmup", 0, "--draft-vocab-size", 70)
    made = invoke(*command(tiny_dir, text_file, first, "--steps", 1, *large))
    assert made.exit_code == 0, made.stderr
    config = open_checkpoint(tiny_dir).config
    ids = load_head(first, config)[0].target_ids()
    sizes = {"kept": (), "given": ("--draft-vocab-size", 90, "--max-seq-len", 20)}
    for name, size in sizes.items():
        out = tmp_path / name
        more = ("train-head", "--model", tiny_dir, "--data", other, "--out", out, "--steps", 1)
        more += ("--held-out", 4, "--init", first, "--loss-vocab-size", 60, "--lr", 1e-9, *size)
        done = invoke(*more)
        assert done.exit_code == 0, done.stderr
    head, (begun, _) = load_head(tmp_path / "kept", config)[0], load_head(first, config)
    assert torch.equal(head.target_ids(), ids)
    assert torch.equal(head.fc.weight, begun.fc.weight)
    assert len(load_head(tmp_path / "given", config)[0].target_ids()) == 90
    record = json.loads((tmp_path / "given" / "training.json").read_text())
    assert record["header"]["training_tokens"] == 26 * 20, "longer texts are cut"


def test_all_rows_of_an_own_lm_head_are_in_the_loss(text_file):
    """A borrowed one has trained rows already."""
    target = random_target(tiny_config(vocab_size=256))
    text = read_conversations(text_file, target.config.vocab_size, 30)
    sizes = dict(tap_layers=(0, 1, 2), draft_vocab_size=40, loss_vocab_size=8)
    for borrow in (False, True):
        options = TrainOptions("eagle3", borrow_lm_head=borrow, **sizes)
        _, ids = module.head_to_train(target, text, None, options)
        assert len(ids) == (8 if borrow else 40)


def test_a_run_goes_on_only_with_the_head_that_it_began_from(
    tiny_dir, text_file, tmp_path, monkeypatch, no_compiler
):
    """Another one at the same path gives weights that no run would."""
    first, out = tmp_path / "first", tmp_path / "out"
    made = invoke(*command(tiny_dir, text_file, first, "--steps", 1))
    assert made.exit_code == 0, made.stderr
    train = command(tiny_dir, text_file, out, "--steps", 1, "--init", first, "--resume")
    monkeypatch.setattr(module, "write_head", lambda *rest: None)  # as if it was killed before
    assert invoke(*train).exit_code == 0
    same = invoke(*train)
    assert same.exit_code == 0 and "continuing at step 1" in same.stderr
    edit_json(first / "config.json", rope_theta=5e5)
    other = invoke(*train)
    assert other.exit_code == 2 and "--held-out and --init, or another --out" in other.stderr


@pytest.mark.slow
def test_two_processes_train_what_one_does(tiny_dir, text_file, tmp_path):
    """Over gloo, from the same text."""
    kind = ("--algorithm", "eagle3", "--tap-layers", "0,1,2", "--noise", 0.1, "--feature-weight", 1)
    kind += ("--self-fed-steps", 1, "--steps", 6)
    heads, headers = [], []
    for size in (1, 2):
        out = tmp_path / str(size)
        launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
        train = (*launch, "-m", "fasteagle", *command(tiny_dir, text_file, out, *kind))
        environment = os.environ | {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        environment["XDG_CACHE_HOME"] = str(tmp_path / f"cache-{size}")  # features of its own
        done = subprocess.run(
            [sys.executable, *map(str, train)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("head written to") == 1
        heads.append(load_file(out / "model.safetensors"))
        headers.append(json.loads((out / "training.json").read_text())["header"])
    for name, one in heads[0].items():
        # Saved in bf16; the order of the sums differs.
        assert torch.allclose(one.float(), heads[1][name].float(), rtol=2e-2, atol=1e-3), name
    assert headers[0]["alphas"] == pytest.approx(headers[1]["alphas"], abs=0.02)


def test_prompts_are_answered_and_trained_on(tiny_dir, text_file, tmp_path, no_compiler):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(12)))
    out = tmp_path / "head"
    files = ("--model", tiny_dir, "--prompts", prompts, "--out", out)
    options = ("--held-out", 3, "--steps", 4, "--batch-tokens", 200, "--answer-tokens", 24)
    sizes = ("--draft-vocab-size", 128, "--loss-vocab-size", 64, "--features", "live")
    sizes += ("--data", text_file, "--max-len", 30)
    arguments = ("train-head", *files, *options, *sizes)
    done = invoke(*arguments)
    assert done.exit_code == 0, done.stderr
    assert "12 conversations | " in done.stderr
    lines = [json.loads(line) for line in (out / "text.jsonl").read_text().splitlines()]
    assert [line["T"] for line in lines[:4]] == [0.0, 0.7, 0.0, 0.7]
    assert max(len(line["ids"]) - line["prompt_len"] for line in lines) == 24
    trained = json.loads((out / "training.json").read_text())["header"]["training_tokens"]
    assert max(len(line["ids"]) for line in lines) > 30
    assert 30 * 27 < trained <= 30 * (30 + 12 - 3), "with --data, and cut"
    for name in ("model.safetensors", "config.json", "training.json"):
        (out / name).unlink()  # else nothing is trained here
    # A last line that was cut off is written again, the others are kept.
    (out / "text.jsonl").write_text("\n".join(json.dumps(line) for line in lines)[:-5])
    few = invoke(*arguments, "--held-out", 42)
    assert few.exit_code == 2 and "42 conversations, too few to hold 42 out" in few.stderr
    done = invoke(*arguments)
    assert done.exit_code == 0, done.stderr
    again = [json.loads(line) for line in (out / "text.jsonl").read_text().splitlines()]
    assert again == lines


def test_features_of_another_precision_are_others(tiny_dir, text_file, tmp_path, no_compiler):
    """They lie in the user cache by what computed them, not by the files alone."""
    fp32 = ("--precision", "fp32")
    bf16 = ("--precision", "bf16")
    runs = fp32, ("--precision", "int8-aten"), fp32, (*fp32, "--kv", "int8"), bf16
    caches, unused = [], cache_dir() / "features" / "unused"
    unused.mkdir(parents=True)
    os.utime(unused, times=(0, 0))
    for i, run in enumerate(runs):
        train = command(tiny_dir, text_file, tmp_path / f"head{i}", "--steps", 1, *run)
        done = invoke(*train)
        assert done.exit_code == 0, done.stderr
        caches.append(set((cache_dir() / "features").iterdir()))
        if i == 1:  # the last run would remove the first one's, had the third not used them
            for folder in caches[0]:
                os.utime(folder, times=(0, 0))
    assert len(caches[1]) == len(caches[0]) + 1 and caches[2] == caches[1]
    assert caches[1] < caches[3] < caches[4]
    assert unused not in caches[0]
    refused = invoke(*command(tiny_dir, text_file, tmp_path / "a", "--precision", "int8-torchao"))
    assert refused.exit_code == 2 and "leave -torchao out" in refused.stderr


def test_runs_that_cannot_go_on_say_so(tiny_dir, text_file, tmp_path, no_compiler, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where an empty --out would be
    out = tmp_path / "head"
    train = command(tiny_dir, text_file, out, "--steps", 2)
    done = invoke(*train, "--seed", 2**63 - 1)  # whose multiples no generator takes
    assert done.exit_code == 0, done.stderr
    before = (out / "model.safetensors").read_bytes()
    for more in ((), ("--resume",)):
        again = invoke(*command(tiny_dir, text_file, out, "--steps", 1), *more)
        assert (
            again.exit_code == 2
            and "holds a model or a head (config.json): give another --out" in again.stderr
        )
    assert (out / "model.safetensors").read_bytes() == before
    more = command(tiny_dir, text_file, tmp_path / "more", "--init", out)
    for wrong, message in (
        (("--held-out", 30), "30 conversations, too few to hold 30 out"),
        (("--prompts", tmp_path / "none.jsonl"), "cannot read"),
        (("--prompts", os.devnull), "/dev/null is a pipe or a device: give a file"),
        (("--draft-vocab-size", 9999), "draft-vocab-size 9,999 is more than the model's"),
        (("--out", ""), "Invalid value for '--out': the path is empty: see"),
        (("--warmup", 2**40), "warmup 1099511627776"),
        (("--window", 2**40), "window 1099511627776"),
        (("--self-fed-steps", 65), "self-fed-steps 65"),
        (("--noise", 1e6), "noise 1000000.0"),
        (("--beta1", 1.5), "beta1 1.5 is out of range: use >= 0 and < 1"),
        (("--weight-decay", -1), "weight-decay -1.0 is out of range"),
        (("--ce-weight", 0, "--feature-weight", 0), "train nothing"),
    ):
        refused = invoke(*more, *wrong)
        assert refused.exit_code == 2 and message in refused.stderr
        assert "loaded" not in refused.stderr
    assert not (tmp_path / "more").exists()


def test_what_is_there_is_not_written_over(tiny_dir, text_file, tmp_path, no_compiler):
    model = shutil.copytree(tiny_dir, tmp_path / "model")
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    refused = invoke(*command(tiny_dir, text_file, model, "--steps", 1))
    assert refused.exit_code == 2 and "holds a model or a head" in refused.stderr
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    out = tmp_path / "out"
    with only_writer(out):
        refused = invoke(*command(tiny_dir, text_file, out, "--steps", 1))
    assert refused.exit_code == 2 and "written by another process" in refused.stderr
    done = invoke(*command(tiny_dir, text_file, out, "--steps", 1), "--resume")
    assert done.exit_code == 0 and "nothing to continue in" in done.stderr


def kill_at_first_save(*arguments: object, compiled: bool) -> None:
    """Run `fasteagle` in a process of its own, which dies once training has saved its state.

    Before that, who reads its progress has left.
    """
    code = (
        "import os, signal\n"
        "from fasteagle.compile import blocks\n"
        f"blocks.missing_compiler = blocks.missing_compiler if {compiled} else lambda: 'none'\n"
        "from fasteagle.training.train import Trainer\n"
        "save = Trainer.save\n"
        "Trainer.save = lambda self: (save(self), os.kill(os.getpid(), signal.SIGKILL))\n"
        "from fasteagle.cli.main import main\n"
        "main()"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    process.stderr.readline()
    process.stderr.close()
    assert process.wait(300) == -signal.SIGKILL
