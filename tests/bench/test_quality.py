"""`fasteagle eval`: perplexity and KL against figures computed another way."""

from __future__ import annotations

import math

import pytest
import torch

from fasteagle.bench.hf import hf_model
from fasteagle.bench.quality import EvalOptions, evaluate
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.quantize import with_scheme
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import RuntimeOptions
from helpers import save_tiny

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
    ids = load_tokenizer(folder).encode(TEXT)[:300]
    windows = [ids[i : i + 64] for i in range(0, 256, 64)]
    full = logits_of(open_checkpoint(folder), windows)
    for q in qualities:
        scheme = None if q.precision == "fp32" else q.precision
        checkpoint = with_scheme(open_checkpoint(folder), scheme)
        theirs = full if scheme is None else logits_of(_plain(checkpoint), windows)
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


def test_a_window_may_be_the_whole_context(folder, text, monkeypatch):
    """Also where that is longer than the context that chat takes by itself."""
    monkeypatch.setattr(RuntimeOptions, "DEFAULT_MAX_SEQ_LEN", 16)
    (quality, _) = evaluate(str(folder), EvalOptions(text, ("fp32",), 512, 512), RuntimeOptions())
    ids = load_tokenizer(folder).encode(TEXT)[:512]
    (probs,) = logits_of(open_checkpoint(folder), [ids])
    nll = -probs.gather(1, torch.tensor(ids[1:])[:, None]).mean()
    assert quality.perplexity == pytest.approx(math.exp(nll), rel=1e-4)


class _plain:
    def __init__(self, checkpoint):
        self.config, self.names, self.load = checkpoint.config, checkpoint.names, checkpoint.load
