"""What is asked of a lent card: passes, gaps and rows, measured beside it in the stages."""

from __future__ import annotations

import dataclasses

import pytest

from fasteagle.bench.gpu_check import asked, large, models, profile
from fasteagle.bench.gpu_check.models import RunsAgain
from fasteagle.bench.gpu_check.report import lines_of, markdown
from fasteagle.compile.measurement import Measurement
from fasteagle.loading.registry import preset
from fasteagle.quant.scheme import int4_for

MS = {1: 10.0, 16: 11.0, 32: 15.0}


@pytest.fixture
def passes(monkeypatch):
    """Passes over so many rows take what `MS` says, but for the first of each, and are captured."""
    captured = []

    class Slow(RunsAgain):
        def milliseconds(self, replay):
            captured.append(replay)
            return super().milliseconds(replay)

    seen = []

    class Timed(Measurement):
        def verify(self, T):
            before = len(captured)
            super().verify(T)
            assert len(captured) > before, "replayed, and timed on the device's clock"
            seen.append(T)
            return MS[T] * (100 if seen.count(T) == 1 else 1)

    monkeypatch.setattr(models, "RunsAgain", Slow)
    monkeypatch.setattr(large, "Measurement", Timed)
    monkeypatch.setattr(large, "copy_bandwidth", lambda *given: 1e-2)
    return seen


def test_passes_of_1_16_and_32_rows_are_timed_in_turn(dry, passes, monkeypatch):
    monkeypatch.setattr(large, "MODELS", ("vicuna-33b",))
    code, found = dry("large")
    assert (code, found["problems"]) == (0, [])
    assert passes == [1, 16, 32] * large.ROUNDS
    assert found["vicuna-33b int4, passes"] == [
        {"rows": 1, "ms": 10.0, "ratio": 1.0},
        {"rows": 16, "ms": 11.0, "ratio": 1.1},
        {"rows": 32, "ms": 15.0, "ratio": 1.5},
    ]
    table = next(t for t in found["tables"] if t["title"].startswith("Captured passes"))
    assert [row[:3] for row in table["rows"]][2] == [32, "15.000", "1.500"]
    config = dataclasses.replace(preset("vicuna-33b"), **models.TINY)
    scheme = int4_for(config)
    weights = config.linear_params * scheme.linear_bytes
    weights += config.vocab_size * config.dim * scheme.head_bytes
    cached = 2 * config.n_layer * config.n_kv_head * config.head_dim * 2 * 256
    gb_s = (weights + cached) / 10.0 / 1e6
    assert table["rows"][0][3:] == [f"{gb_s:.0f}", f"{gb_s / 1e-2:.1%}"]


def test_what_is_asked_is_beside_it_in_summary_json_and_markdown(dry, passes, monkeypatch):
    monkeypatch.setattr(large, "MODELS", ("vicuna-33b",))
    found = dry("large")[1]
    entered = {figure["what"]: figure for figure in found["asked"]}
    assert entered["verify(16) / decode(1)"] == {
        "what": "verify(16) / decode(1)",
        "measured": 1.1,
        "text": "1.10",
        "asked": "<= 1.15",
        "met": True,
    }
    assert not entered["verify(32) / decode(1)"]["met"]
    plain, eagle = found["vicuna-33b int4"]["rows"]
    sheet = found["vicuna-33b int4"]["meta"]["bandwidth"]["gb_s"]
    share = entered["plain, share of the copy bandwidth"]
    assert share["measured"] == pytest.approx(plain["mbu"] * sheet / 1e-2, rel=1e-4)
    assert entered["eagle at tau 3.6 / plain"]["measured"] == eagle["speedup_vs_plain"]
    assert len(entered) == 4
    entry = {"name": "large", "what": "x", "seconds": 1.0, "error": None, "results": found}
    line = "vicuna-33b int4: verify(32) / decode(1) 1.50, asked <= 1.4: missed"
    assert f"  {line}" in lines_of(entry)
    meta = {"date": "2026-01-01", "dry_run": True, "command": "x"}
    text = markdown({"meta": meta, "stages": [entry]})
    assert "| verify(16) / decode(1) | 1.10 | <= 1.15 | yes |" in text and f"- {line}" in text


def test_70b_is_timed_and_nothing_is_asked_of_it(dry, passes, monkeypatch):
    monkeypatch.setattr(large, "MODELS", ("llama2-70b",))
    code, found = dry("large")
    assert code == 0 and "asked" not in found and "llama2-70b int4, passes" in found


@pytest.mark.parametrize(
    ("figure", "met", "missed", "said"),
    [
        (asked.VERIFY[16], 1.15, 1.16, "<= 1.15"),
        (asked.VERIFY[32], 1.4, 1.41, "<= 1.4"),
        (asked.PLAIN, 0.7, 0.69, ">= 70 %"),
        (asked.EAGLE, 2.5, 2.49, ">= 2.5"),
        (asked.GAPS, 0.05, 0.051, "<= 5 %"),
    ],
)
def test_limits(figure, met, missed, said):
    assert figure.met(met) and not figure.met(missed) and figure.goal == said
    assert not figure.met(float("nan"))


def test_gaps_are_of_the_time_without_the_profiler():
    """It stretches what it records: 1.9 ms of 2 were 1.9 of 2.4 under it."""
    assert profile.gaps(1.9, 2.0) == 0.05
    assert profile.gaps(2.1, 2.0) == 0.0
    assert profile.gaps(0.0, 2.0) is None, "nothing was recorded"


def test_the_profile_judges_33b_and_shows_7b(dry, monkeypatch):
    events = [profile.Event("gemm", 0, 1900), profile.Event("norm", 2300, 2400)]
    monkeypatch.setattr(profile, "profiled", lambda engine, n: events)
    monkeypatch.setattr(profile, "cycle_ms", lambda engine, n: 1.25)
    monkeypatch.setattr(profile, "FEW_CYCLES", 1)
    code, found = dry("profile")
    assert (code, found["problems"]) == (0, [])
    for name in ("vicuna-33b", "llama2-7b"):
        for way in ("plain", "eagle"):
            cycle = found[f"{name} int4, {way}"]
            assert (cycle["idle"], cycle["gaps"]) == (pytest.approx(1 / 6, abs=1e-4), 0.0)
    assert [(f["what"], f["text"], f["met"]) for f in found["asked"]] == [
        ("gaps of a cycle, plain", "0.0 %", True),
        ("gaps of a cycle, eagle", "0.0 %", True),
    ]
    monkeypatch.setattr(profile, "cycle_ms", lambda engine, n: 2.5)
    lines = dry("profile")[1]["lines"]
    assert "vicuna-33b int4: gaps of a cycle, eagle 20.0 %, asked <= 5 %: missed" in lines
    assert any("idle 20.0% of the captured time, 16.7% under the profiler" in s for s in lines)
