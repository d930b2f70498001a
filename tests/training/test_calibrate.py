"""Fitting a head to a quantized target: each stage by itself, the decision, and the command."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

from fasteagle.cli import main as cli
from fasteagle.config import HeadConfig
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.registry import preset
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme, parse_scheme
from fasteagle.training import calibrate
from fasteagle.training.calibrate_head import CalibrateOptions, peak_bytes
from fasteagle.training.data import Conversation, compute_features
from fasteagle.training.train import HeldOut, head_loss, make_batch, new_head
from helpers import (
    OPTIONS,
    kill_at_first_save,
    random_head,
    random_target,
    save_tiny,
    talk,
    tiny_config,
    write_random_text,
)

SCHEME = Scheme(4, 32)


@pytest.fixture(scope="module")
def target():
    return random_target(tiny_config(dim=64, n_head=4, head_dim=16, ffn_dim=96))


def held(*counts) -> HeldOut:
    return HeldOut((0.5,), 1.5, sum(rows for rows, _ in counts), tuple(counts))


def test_a_gain_is_sure_only_beyond_its_interval():
    before = held(*[(50, 50)] * 20)
    better = calibrate.gain(before, held(*[(50, 60)] * 20))
    assert better.tau == pytest.approx(0.2) and better.low == better.high and better.is_sure
    g = torch.Generator().manual_seed(0)
    noise = (torch.randint(-20, 21, (20,), generator=g)).tolist()
    same = calibrate.gain(before, held(*[(50, 50 + n) for n in noise]))
    assert same.low < same.tau < same.high and not same.is_sure
    worse = calibrate.gain(before, held(*[(50, 40)] * 20))
    assert worse.tau == pytest.approx(-0.2) and not worse.is_sure


class Store:
    """Features in memory."""

    def __init__(self, features):
        self._features = features
        self.lengths = [len(f) for f in features]
        self.prompt_lens = [1] * len(features)

    def __len__(self):
        return len(self._features)

    def conversation(self, i):
        return torch.zeros(self.lengths[i], dtype=torch.long), self._features[i]


@torch.no_grad()
def test_the_map_undoes_what_was_done_to_the_features(target):
    """Features bent by a known affine map: the folded head sees them as before."""
    head = random_head(target, rope_base=10000.0)
    g = torch.Generator().manual_seed(1)
    full = [torch.randn(200, 64, generator=g) for _ in range(6)]
    bend = torch.eye(64) + 0.2 * torch.randn(64, 64, generator=g) / 8
    bent = [f @ bend.T + 0.3 for f in full]
    fixed = calibrate.fold_feature_map(head, Store(full), Store(bent))
    embeds = torch.randn(5, 64, generator=g)
    wanted = head.fc(torch.cat((embeds, full[0][:5]), -1))
    unfixed = head.fc(torch.cat((embeds, bent[0][:5]), -1))
    found = fixed.fc(torch.cat((embeds, bent[0][:5]), -1))
    assert (found - wanted).norm() < 0.02 * (unfixed - wanted).norm()
    untouched = calibrate.fold_feature_map(head, Store(full), Store(full))
    assert torch.allclose(untouched.fc.weight, head.fc.weight, atol=1e-4)


def test_the_vocabulary_is_what_the_target_says(target):
    head = random_head(target, torch.arange(20, 40), rope_base=10000.0)
    said = [Conversation([1, 2, 50, 50, 51, 52, 50], 2)]
    ids = calibrate.rebuilt_vocabulary(head, said).target_ids().tolist()
    assert len(ids) == 20 and {50, 51, 52} <= set(ids)
    assert set(ids) - {50, 51, 52} <= set(range(20, 40))  # the rest is from before


@torch.no_grad()
def test_what_is_judged_is_what_runs(target):
    """A head judged in fp32 with the values its quantized linears hold."""
    head = random_head(target, rope_base=10000.0)
    judged = calibrate.as_quantized(head, SCHEME)
    expected = quantize_weight(head.fc.weight, SCHEME).dequantize()
    assert torch.equal(judged.fc.weight, expected)
    assert judged.block.mlp.down.weight.shape == head.block.mlp.down.weight.shape
    assert not torch.equal(judged.block.attention.qkv.weight, head.block.attention.qkv.weight)


def test_training_quantized_leaves_less_to_lose(target, tmp_path):
    """After fake-quantized training the head loses less to quantization than after plain."""
    store = compute_features(Engine(target, 256), talk(target, 24), tmp_path / "features")
    options = dataclasses.replace(OPTIONS, steps=60, lr=3e-3, noise=0.0)

    def loss(head) -> float:
        head.borrow(target, 256)
        rows = target.head_rows(head.target_ids())
        batch = make_batch(store, list(range(3, len(store))), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        table = target.embedding.weight
        with torch.no_grad():
            return head_loss(head, rows, table, batch, options, generator).item()

    lost = {}
    for name, scheme in (("plain", None), ("fake", SCHEME)):
        seen: list[float] = []
        trained = calibrate.distilled(
            new_head(target, torch.arange(60), options),
            target,
            store,
            [0, 1, 2],
            options,
            tmp_path / name,
            "",
            scheme,
            lambda entry: None,
            lambda step, loss, seen=seen: seen.append(loss),
            100,
        )
        assert sum(seen[-10:]) < 0.9 * sum(seen[:10])
        lost[name] = loss(calibrate.as_quantized(trained, SCHEME)) - loss(trained)
        assert not [k for k in trained.state_dict() if "parametrizations" in k]
        saved = torch.load(tmp_path / name / "state.pt", weights_only=True)["head"]
        assert any("parametrizations" in k for k in saved) == (scheme is not None)
    assert lost["plain"] > 0.005 and lost["fake"] < 0.3 * lost["plain"], lost


def test_memory_of_a_7b_fits_24_gb():
    """By hand: int4 weights, KV cache, the head four times in fp32, rows, one batch."""
    seven = preset("llama2-7b")
    block = 4 * 4096**2 + 3 * 4096 * 11008
    head = HeadConfig(dataclasses.replace(seven, n_layer=1), draft_vocab_size=32000)
    scheme = parse_scheme("int4-g128", seven)
    cache = seven.kv_bytes(4096 + 256)
    full = 2 * (32 * block + 2 * 32000 * 4096) + cache
    options = calibrate.training_options(1)
    batch = options.batch_tokens * 4 * (12 * 4096 + 4 * 11008) * options.unroll
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


# The command


@pytest.fixture(scope="module")
def model_and_head(tmp_path_factory):
    from fasteagle.loading.checkpoint import load_model, open_checkpoint
    from fasteagle.loading.head_file import save_head

    sizes = {"intermediate_size": 128, "num_hidden_layers": 1}  # one layer is compiled sooner
    folder = save_tiny(tmp_path_factory.mktemp("c") / "model", "llama3", **sizes)
    model = load_model(open_checkpoint(folder), dtype=torch.float32, device="cpu", max_seq_len=64)
    head = random_head(model, torch.arange(0, 260, 2), rope_scaling=None, rope_base=10000.0)
    save_head(folder.parent / "head", head, {}, torch.float32)
    return folder, folder.parent / "head"


@pytest.fixture
def text(tmp_path):
    return write_random_text(tmp_path / "text.jsonl", 32, 40)


def invoke(*arguments):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


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


def test_a_model_makes_up_conversations(tmp_path, tiny_dir):
    """Whole ones, the same each time, and a cut-off file is continued."""
    from fasteagle.loading.checkpoint import load_model, open_checkpoint
    from fasteagle.loading.text import write_conversations
    from fasteagle.loading.tokenizer import load_tokenizer

    model = load_model(
        open_checkpoint(tiny_dir), dtype=torch.float32, device="cpu", max_seq_len=256
    )
    engine, tokenizer = Engine(model, 256), load_tokenizer(tiny_dir)
    whole = write_conversations(engine, tokenizer, tmp_path / "a.jsonl", 300, 12)
    lines = whole.read_text().splitlines()
    assert sum(len(json.loads(line)["ids"]) for line in lines) >= 300
    assert [json.loads(line)["T"] for line in lines[:3]] == [0.0, 0.7, 1.0]
    part = tmp_path / "b.jsonl"
    part.write_text("\n".join(lines[:2]) + "\n" + lines[2][:9])
    write_conversations(engine, tokenizer, part, 300, 12)
    assert part.read_text().splitlines() == lines
    few = write_conversations(
        engine, tokenizer, tmp_path / "c.jsonl", 300, 12, enough=lambda n: n >= 2
    )
    assert few.read_text().splitlines() == lines[:2]
