"""`fasteagle calibrate-head`: its memory, its options, a killed run and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from fasteagle.cli import main as cli
from fasteagle.config import HeadConfig
from fasteagle.errors import FasteagleError
from fasteagle.loading.open import OpenedModel
from fasteagle.loading.registry import preset
from fasteagle.options import RuntimeOptions
from fasteagle.quant.scheme import parse_scheme
from fasteagle.training import calibrate
from fasteagle.training.calibrate import peak_bytes
from fasteagle.training.calibrate_head import calibrate_head
from fasteagle.training.calibration import Calibration
from fasteagle.training.options import CalibrateOptions
from fasteagle.training.stages import Stages
from fasteagle.training.work import Work
from helpers import eagle3_of, kill_at_first_save, random_head, save_tiny, write_random_text


def test_memory_of_a_7b_fits_24_gb():
    """By hand: int4 weights, KV cache, the head four times in fp32, rows, one batch."""
    seven = preset("llama2-7b")
    block = 4 * 4096**2 + 3 * 4096 * 11008
    head = HeadConfig(dataclasses.replace(seven, n_layer=1), draft_vocab_size=32000)
    scheme = parse_scheme("int4-g128", seven)
    cache = seven.kv_bytes(4096 + 256)
    full = 2 * (32 * block + 2 * 32000 * 4096) + cache
    options = calibrate.training_options(1)
    batch = options.batch_tokens * 4 * (12 * 4096 + 4 * 11008) * options.n_steps_ahead
    training = 16 * (block + 2 * 4096**2) + 2 * 32000 * 4096 + batch
    expected = max(full, scheme.model_bytes(seven) + cache + training)
    assert peak_bytes(seven, head, scheme, 4096) == pytest.approx(expected, rel=1e-6)
    assert expected < 24e9
    thirteen = preset("llama2-13b")
    big = HeadConfig(dataclasses.replace(thirteen, n_layer=1), 32000)
    assert peak_bytes(thirteen, big, parse_scheme("int4", thirteen), 4096) > 24e9  # the bf16 one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 10}, "tokens 10 are too few"),
        ({"minutes": 0}, "minutes 0 is out of range"),
        ({"steps": 0}, "steps 0 is out of range"),
    ],
)
def test_options_out_of_range(change, message):
    with pytest.raises(FasteagleError, match=message):
        CalibrateOptions(**change)


@pytest.fixture(scope="module")
def model_and_head(tmp_path_factory):
    return written(tmp_path_factory.mktemp("c"), "eagle1")


def written(folder, algorithm):
    """A tiny model and a random head for it."""
    from fasteagle.loading.checkpoint import load_model, open_checkpoint
    from fasteagle.loading.head_file import save_head

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


def invoke(*arguments):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


@pytest.mark.parametrize("with_data", [False, True])
def test_quantizing_counts_and_too_little_time_is_said_after_loading(
    model_and_head, text, tmp_path, monkeypatch, capsys, no_compiler, with_data
):
    """The clock starts with the command; here quantizing takes half an hour."""
    folder, head = model_and_head
    clock = [0.0]
    monkeypatch.setattr("fasteagle.training.calibrate_head.time.perf_counter", lambda: clock[0])
    prepared, left = OpenedModel.prepared, []

    def slowly(self, *args, **kwargs):
        clock[0] += 1800
        return prepared(self, *args, **kwargs)

    def stop(run, engine):
        left.append(run.left)
        raise FasteagleError("far enough")

    monkeypatch.setattr(OpenedModel, "prepared", slowly)
    monkeypatch.setattr(Calibration, "text", stop)
    runtime = RuntimeOptions(device="cpu", quant="int4-g32", max_seq_len=384)
    options = CalibrateOptions(
        head=str(head), minutes=20, data=text if with_data else None, out=tmp_path / "out"
    )
    with pytest.raises(FasteagleError, match="far enough"):
        calibrate_head(str(folder), runtime, options)
    assert "the least that calibration needs takes about 30 minutes" in capsys.readouterr().err
    assert left[0] <= -600


def stopped(monkeypatch, model, runtime, **options):
    """The calibration that `calibrate_head` would begin now."""
    begun = []

    def stop(run, out):
        begun.append(run)
        raise FasteagleError("far enough")

    monkeypatch.setattr("fasteagle.training.calibrate_head._calibrate", stop)
    with pytest.raises(FasteagleError, match="far enough"):
        calibrate_head(str(model), runtime, CalibrateOptions(**options))
    return begun[0]


@pytest.mark.real_model
def test_a_file_keeps_its_own_bits_whatever_activations_are(tmp_path, monkeypatch):
    for dtype in ("auto", "fp32"):
        runtime = RuntimeOptions(device="cpu", dtype=dtype)
        run = stopped(monkeypatch, "smollm2-135m", runtime, out=tmp_path / dtype)
        assert run.scheme.name == "int4-g32-own" and not run.has_unquantized


def test_memory_is_counted_for_the_length_asked_for(model_and_head, tmp_path, monkeypatch):
    folder, head = model_and_head
    lengths = []

    def peak(config, head, scheme, length):
        lengths.append(length)
        return 0.0

    monkeypatch.setattr("fasteagle.training.calibration.peak_bytes", peak)
    runtime = RuntimeOptions(device="cpu", quant="int4-g32", max_seq_len=384)
    stopped(monkeypatch, folder, runtime, head=str(head), out=tmp_path / "out")
    assert lengths == [384]


def test_weights_of_torchao_are_refused(model_and_head, tmp_path):
    folder, head = model_and_head
    runtime = RuntimeOptions(device="cpu", quant="int4-g32", backend="torchao")
    options = CalibrateOptions(head=str(head), out=tmp_path / "out")
    with pytest.raises(FasteagleError, match="leave out --quant-backend"):
        calibrate_head(str(folder), runtime, options)


@pytest.mark.slow
def test_the_command_survives_a_kill_and_chat_finds_the_head(
    model_and_head, text, tmp_path, monkeypatch, compiled
):
    monkeypatch.setattr("fasteagle.training.report.SPEED_PROMPTS", 2)
    monkeypatch.setattr("fasteagle.training.report.SPEED_TOKENS", 16)
    folder, head = model_and_head
    out, work = tmp_path / "out", tmp_path / "out.calibrating"
    model = ("--model", folder, "--quant", "int4-g32")
    command = ("calibrate-head", *model, "--head", head, "--data", text, "--steps", 30)
    command += ("--minutes", 600, "--max-seq-len", 384, "--out", out)
    kill_at_first_save(*command, compiled=compiled)
    state = json.loads((work / "state.json").read_text())
    assert state["results"]["unquantized"]["tau"] >= 1  # not to be done again
    saved = torch.load(work / "iv-distilled" / "run" / "state.pt", weights_only=True)
    assert saved["step"] == 25
    again = invoke(*command)
    assert again.exit_code == 2 and "continue it with --resume" in again.stderr
    other = invoke(*command, "--resume", "--tokens", 4000)
    assert other.exit_code == 2 and "begun with other tokens" in other.stderr
    done = invoke(*command, "--resume")
    assert done.exit_code == 0, done.stderr
    assert "i, unquantized target: tau" not in done.stderr and not work.exists()
    assert "iv, distilled: step 27," in done.stderr and "iv, distilled: step 24," not in done.stderr
    report = json.loads((out / "calibration.json").read_text())
    names = [stage["stage"] for stage in report["stages"]]
    stages = ["i, as it was", "ii, feature map", "iii, vocabulary", "iv, distilled", "v, quantized"]
    assert names == stages and report["plain_tok_s"] > 0
    for stage in report["stages"][1:]:
        low, high = stage["interval"]
        assert low <= high and stage["kept"] == (low > 0)
    assert report["written"] == [s["stage"] for s in report["stages"] if s["kept"]][-1]
    chat = ("chat", *model, "--head", out, "-p", "hi", "--max-new-tokens", 4, "--max-seq-len", 128)
    said = invoke(*chat)
    assert said.exit_code == 0 and "warning" not in said.stderr, said.stderr


@pytest.mark.slow
def test_an_eagle3_head_goes_through_all_stages(tmp_path, text, monkeypatch, no_compiler):
    monkeypatch.setattr("fasteagle.training.report.SPEED_PROMPTS", 1)
    monkeypatch.setattr("fasteagle.training.report.SPEED_TOKENS", 8)
    folder, head = written(tmp_path, "eagle3")
    out, model = tmp_path / "out", ("--model", folder, "--quant", "int4-g32")
    command = ("calibrate-head", *model, "--head", head, "--data", text, "--steps", 4)
    done = invoke(*command, "--minutes", 600, "--max-seq-len", 384, "--out", out)
    assert done.exit_code == 0, done.stderr
    report = json.loads((out / "calibration.json").read_text())
    names = [stage["stage"] for stage in report["stages"]]
    assert names == [
        "i, as it was",
        "ii, feature map",
        "iii, vocabulary",
        "iv, distilled",
        "v, quantized",
    ]
    assert report["header"]["algorithm"] == "eagle3"
    chat = ("chat", *model, "--head", out, "-p", "hi", "--max-new-tokens", 4, "--max-seq-len", 128)
    said = invoke(*chat)
    assert said.exit_code == 0 and "warning" not in said.stderr, said.stderr


@pytest.mark.parametrize(
    ("left", "quantized", "steps"),
    [(100.0, False, 50), (100.0, True, 100), (30.0, False, 30), (19.0, False, None)],
)
def test_training_takes_the_time_that_is_left(monkeypatch, tmp_path, left, quantized, steps):
    """A step takes a second. Half the time is for the second run, unless that is too short."""
    asked = []

    class Unfinished(Exception):
        pass

    def distilled(head, model, store, held_out, options, *rest, **keywords):
        asked.append(options.steps)
        raise Unfinished

    run = mock.Mock(left=left, options=mock.Mock(steps=None), algorithm="eagle1")
    run.work.folder, run.work.seconds, run.work.result = tmp_path, 0.0, lambda name: None
    monkeypatch.setattr(Stages, "step_seconds", lambda *given: 1.0)
    monkeypatch.setattr("fasteagle.training.stages.ready_head", lambda head, engine, scheme: head)
    monkeypatch.setattr("fasteagle.training.calibrate.distilled", distilled)
    stages = Stages(run, mock.Mock(), mock.Mock(), [])
    scheme = parse_scheme("int4-g32", preset("llama2-7b")) if quantized else None
    with contextlib.suppress(Unfinished):
        assert stages.distill("iv, distilled", scheme, mock.Mock()) is None
    assert asked == ([] if steps is None else [steps])


@pytest.mark.slow
def test_without_time_a_head_is_written_and_the_rest_left_out(tmp_path, monkeypatch, no_compiler):
    """The clock says that all the time was spent before it began."""
    monkeypatch.setattr(Work, "seconds", property(lambda self: 1e9))
    monkeypatch.setattr("fasteagle.training.calibration.ANSWER_TOKENS", 16)
    monkeypatch.setattr("fasteagle.training.report.SPEED_PROMPTS", 1)
    monkeypatch.setattr("fasteagle.training.report.SPEED_TOKENS", 8)
    folder, head = written(tmp_path, "eagle1")
    out = tmp_path / "out"
    command = ("calibrate-head", "--model", folder, "--quant", "int4-g32", "--head", head)
    done = invoke(*command, "--tokens", 100_000, "--max-seq-len", 384, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert "the least that calibration needs takes about" in done.stderr
    assert "i, ii: left out, the unquantized target takes too long" in done.stderr
    for name in ("iv, distilled", "v, quantized"):
        assert f"{name}: left out, the time is up" in done.stderr
    report = json.loads((out / "calibration.json").read_text())
    assert [s["stage"] for s in report["stages"]] == ["i, as it was", "iii, vocabulary"]
