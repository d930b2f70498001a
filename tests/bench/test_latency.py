"""The latency of a token, and percentiles."""

from __future__ import annotations

import pytest

from fasteagle.bench.latency import percentile
from fasteagle.bench.report import build_report, markdown
from fasteagle.bench.rows import Row, Turn
from fasteagle.bench.run import BenchOptions
from fasteagle.options import RuntimeOptions

CPU = RuntimeOptions(device="cpu")


def test_latency_of_a_token_is_its_share_of_its_chunk():
    row = Row("eagle", "bf16", decoder=None, weight_bytes=1)
    chunks = ((3, 0.3), (1, 0.5), (2, 0.1))
    row.turns = [Turn([1] * 7, 0.5, 0.9, 3, chunks=chunks)]
    assert row.latencies == pytest.approx([0.1, 0.1, 0.1, 0.5, 0.05, 0.05])
    assert sum(row.latencies) == pytest.approx(row.seconds)
    report = build_report([row], BenchOptions(), CPU, save_outputs=False)
    assert (report["rows"][0]["p50_ms"], report["rows"][0]["p99_ms"]) == (100, 500)
    assert "| 100.0 / 500.0 |" in markdown(report)
    row.turns = [Turn([1], 0.5, 0.0, 0)]  # an answer of one token has no gaps
    report = build_report([row], BenchOptions(), CPU, save_outputs=False)
    assert report["rows"][0]["p50_ms"] is None and "None" not in markdown(report)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0], 0.5, 1.0),
        (range(1, 101), 0.99, 99),
        ([], 0.5, None),
        (range(100, 0, -1), 0.5, 50),
        ([1.0, 2.0], 0.0, 1.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_percentiles(values, share, expected):
    assert percentile(values, share) == expected
