"""`fasteagle eval`: perplexity and KL against figures computed another way."""

from __future__ import annotations

import errno
import json
import math

import pytest
import torch

from fasteagle.bench import quality
from fasteagle.bench.hf import hf_model
from fasteagle.bench.quality import EvalOptions, evaluate
from fasteagle.device import pick_dtype
from fasteagle.loading.checkpoint import open_checkpoint, required_bytes
from fasteagle.loading.quantize import with_scheme
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import RuntimeOptions
from helpers import Dequantized, invoke, raising, save_tiny

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("e") / "model", "smollm2", intermediate_size=128)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def logits_of(checkpoint, windows):
    model = hf_model(checkpoint, torch.float32, "cpu")
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for ids in windows]


def test_against_transformers(folder, text, monkeypatch, capsys):
    options = EvalOptions(text, ("fp32", "int8", "int4-g32"), tokens=300, window=64)
    # The stored values, nothing else.
    runtime = RuntimeOptions(dtype="fp32", lm_head="keep", cpu_kernels="aten")
    monkeypatch.setattr("fasteagle.errors.TELL_SECONDS", 0)
    qualities = evaluate(str(folder), options, runtime)
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("predicted 1 of 4 windows ...") == 4, lines
    assert lines.count("int8: compared 4 of 4 windows ...") == 1, lines
    assert [q.precision for q in qualities] == ["fp32", "fp32", "int8", "int4-g32"]
    assert [q.scheme for q in qualities[:2]] == ["unquantized"] * 2
    ids = load_tokenizer(folder).encode(TEXT)[:300]
    windows = [ids[i : i + 64] for i in range(0, 256, 64)]
    full = logits_of(open_checkpoint(folder), windows)
    for q in qualities:
        scheme = None if q.precision == "fp32" else q.precision
        checkpoint = with_scheme(open_checkpoint(folder), scheme)
        theirs = full if scheme is None else logits_of(Dequantized(checkpoint), windows)
        nll = -torch.cat(
            [
                p.gather(1, torch.tensor(w[1:])[:, None])
                for p, w in zip(theirs, windows, strict=True)
            ]
        ).mean()
        p, r = torch.cat(theirs), torch.cat(full)
        kl = (r.exp() * (r - p)).sum(-1).mean()
        assert q.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
        assert q.kl == pytest.approx(float(kl), rel=1e-3, abs=1e-6)
    exact, eight, four = qualities[1:]
    assert exact.kl < 1e-6 < eight.kl < four.kl and exact.agreement == 1 > four.agreement
    assert exact.weight_gb > eight.weight_gb > four.weight_gb
    dense = required_bytes(open_checkpoint(folder).config, torch.float32, 0)[0]
    assert exact.weight_gb == pytest.approx(dense / 1e9)


def test_a_cache_in_8_bits_is_compared_with_a_whole_one(folder, text):
    options = EvalOptions(text, ("fp32",), tokens=64, window=32)
    _, short = evaluate(str(folder), options, RuntimeOptions(kv="int8"))
    assert short.kl > 1e-7


def test_a_window_may_be_the_whole_context(folder, text, monkeypatch):
    """Also where that is longer than the context that chat takes by itself."""
    monkeypatch.setattr(RuntimeOptions, "DEFAULT_MAX_SEQ_LEN", 16)
    (quality, _) = evaluate(str(folder), EvalOptions(text, ("fp32",), 512, 512), RuntimeOptions())
    ids = load_tokenizer(folder).encode(TEXT)[:512]
    (probs,) = logits_of(open_checkpoint(folder), [ids])
    nll = -probs.gather(1, torch.tensor(ids[1:])[:, None]).mean()
    assert quality.perplexity == pytest.approx(math.exp(nll), rel=1e-4)


def test_the_reference_has_16_bits_where_32_would_fill_the_memory(folder, text, monkeypatch):
    """A tenth stays free."""
    config = open_checkpoint(folder).config
    need = sum(required_bytes(config, torch.float32, 32))
    options = EvalOptions(text, ("fp32",), tokens=32, window=32)
    for factor, dense in ((1.2, "fp32"), (1.05, pick_dtype("auto", torch.device("cpu")))):
        monkeypatch.setattr(quality, "available_bytes", lambda device, f=factor: int(f * need))
        (reference, _) = evaluate(str(folder), options, RuntimeOptions(device="cpu"))
        assert reference.precision == dense


def test_what_cannot_run_is_refused_before_anything_is_computed(folder, text, monkeypatch):
    """On as many threads as are named."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(quality, "Predictions", raising(AssertionError("it is computed")))
    done = invoke("eval", "--model", folder, "--text", text, "--precision", "fp32,int4-g128")
    assert done.exit_code == 2 and "groups of 128 do not divide" in done.stderr, done.exception
    done = invoke("eval", "--model", folder, "--text", text, "--precision", "int8,auto-lm4")
    assert done.exit_code == 2 and "parts of a quantized precision" in done.stderr, done.exception
    done = invoke("eval", "--model", folder, "--text", text, "--json", text / "record.json")
    assert done.exit_code == 2 and "record.json" in done.stderr, done.exception
    invoke("eval", "--model", folder, "--text", text, "--threads", 1, "--precision", "int4-g128")
    assert (threads, torch.get_num_threads()) == (2, 1)


def test_a_record_has_the_numbers_of_the_table(folder, text, tmp_path, monkeypatch):
    """Which is there where that cannot be written."""
    path = tmp_path / "record.json"
    options = ["--precision", "fp32", "--tokens", "64", "--window", "32", "--md", "--json"]
    result = invoke("eval", "--model", folder, "--text", text, *options, path)
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert (record["model"], record["text"]) == (str(folder), "text.txt")
    lines = [line.split("|")[1:-1] for line in result.stdout.splitlines()[2:]]
    assert [[cell.strip() for cell in line] for line in lines] == [
        [
            *(row["precision"], row["scheme"]),
            *(f"{row['perplexity']:.3f}", f"{row['kl']:.5f}"),
            *(f"{100 * row['agreement']:.2f} %", f"{row['weight_gb']:.3f}"),
        ]
        for row in record["rows"]
    ]
    monkeypatch.setattr(quality, "write_json", raising(OSError(errno.ENOSPC, "No space left")))
    full = invoke("eval", "--model", folder, "--text", text, *options, path)
    assert full.exit_code == 2 and full.stdout == result.stdout, full.stderr
