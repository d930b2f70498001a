"""What can be refused before a model is loaded is refused before: heads, trees, texts, outputs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fasteagle.cli import main as cli
from fasteagle.loading.open import OpenedModel

TUNE, CHAT = ["tune"], ["chat", "-p", "x"]
EVAL = ["eval", "--precision", "fp32"]
QUANTIZE = ["quantize", "--int8"]
TRAIN, CALIBRATE = ["train-head", "--out", "DIR/out"], ["calibrate-head", "--precision", "int4-g32"]
BENCH = ["bench", "--no-compile", "--precision", "fp32"]

# The command, what is wrong with it ("DIR" is a folder, "HEAD" a head for width 32), the error.
BAD = [
    (CHAT, ["--head", "HEAD"], "the head is for a width of 32, the model has 64"),
    (TUNE, ["--head", "HEAD"], "the head is for a width of 32, the model has 64"),
    (BENCH, ["--head", "HEAD"], "the head is for a width of 32, the model has 64"),
    (CHAT, ["--head", "DIR/none"], "no such folder"),
    (BENCH, ["--head", "DIR/none"], "no such folder"),
    (CHAT, ["--tree", "DIR/none.json"], "tree file DIR/none.json"),
    (BENCH, ["--rows", "eagle-static", "--tree", "DIR/none.json"], "tree file DIR/none.json"),
    (CHAT, ["--tree-nodes", "99"], "tree-nodes 99 is more than the"),
    (BENCH, ["--tree-nodes", "99"], "tree-nodes 99 is more than the"),
    (BENCH, ["--data", "DIR/none.jsonl"], "cannot read DIR/none.jsonl"),
    (BENCH, ["--json", "/proc/none.json"], "cannot write /proc/none.json"),
    (EVAL, ["--text", "DIR/none.txt"], "cannot read DIR/none.txt"),
    (EVAL, ["--text", "DIR/text", "--json", "/proc/none.json"], "cannot write /proc/none.json"),
    (QUANTIZE, ["-o", "/proc/none"], "cannot write /proc/none"),
    (QUANTIZE, ["-o", "DIR/out", "--data", "DIR/text"], "--data is gone: leave it out"),
    (TRAIN, [], "nothing to train on: give --data"),
    (TRAIN, ["--device", "nope"], "device 'nope' is not supported"),
    (CALIBRATE, ["--device", "nope"], "device 'nope' is not supported"),
    (TRAIN, ["--data", "DIR/text"], "DIR/text, line 1: expected"),
    (TRAIN, ["--prompts", "DIR/text"], "DIR/text, line 1: expected"),
    (TRAIN, ["--inputs", "token"], "--inputs is gone: an EAGLE-1 head reads"),
    (TRAIN, ["--data", "DIR/text", "--init", "HEAD"], "the head is for a width of 32, the model"),
    (
        TRAIN,
        ["--data", "DIR/text", "--algorithm", "eagle3"],
        "auxiliary layers 2, 1, 0 must ascend",
    ),
    (TRAIN, ["--data", "DIR/text", "--out", "/proc/none"], "cannot write /proc/none/state.pt"),
    (CALIBRATE, ["--head", "HEAD"], "the head is for a width of 32, the model has 64"),
    (CALIBRATE, ["--data", "DIR/text"], "DIR/text, line 1: expected"),
    (CALIBRATE, ["--out", "/proc/none"], "cannot write /proc/none/config.json"),
]


@pytest.fixture
def folder(tmp_path):
    """Holds a text, and a head whose config is for another model."""
    (tmp_path / "text").write_text("word " * 10_000)
    config = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 260,
    }
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(("command", "options", "message"), BAD)
def test_refused_before_weights_are_read(
    tiny_dir, folder, monkeypatch, script, command, options, message
):
    monkeypatch.setattr(OpenedModel, "prepared", lambda *a: pytest.fail("the model was loaded"))
    places = {"DIR": str(folder), "HEAD": str(folder / "head")}

    def placed(text):
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    arguments = [*map(placed, command[1:]), "--model", str(tiny_dir), *map(placed, options)]
    if command[0] == "bench":
        done = script(*arguments)
    else:
        done = CliRunner().invoke(cli.main, [command[0], *arguments])
    assert done.exit_code == 2, (done.output, done.exception)
    assert placed(message) in done.stderr.splitlines()[-1]
