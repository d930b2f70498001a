"""The chart of a benchmark record, and every reason why there cannot be one."""

from __future__ import annotations

import sys

import pytest

from fasteagle.bench.plot import check_plot, confidence_figure, figure, save_chart
from fasteagle.errors import FasteagleError


def record(*rows):
    keys = ("name", "precision", "tok_s", "tau", "simulated")
    meta = {"model": "tiny", "temperature": 0.0, "device": "a CPU"}
    return {"meta": meta, "rows": [dict(zip(keys, row, strict=True)) for row in rows]}


REPORT = record(
    ("hf", "bf16", 20.0, 1.0, False),
    ("plain", "bf16", 40.0, 1.0, False),
    ("eagle", "bf16", 80.0, 2.3, True),
    ("plain", "int4", 90.0, 1.0, False),
)


def test_bars_are_the_rows_with_tau_and_what_is_simulated():
    axes = figure(REPORT).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["hf", "plain", "eagle"]
    bf16, int4 = axes.containers
    assert [bar.get_height() for bar in bf16] == [20, 40, 80]
    assert [bar.get_height() for bar in int4] == [90]
    # on both sides of plain's tick
    assert bf16[1].get_x() + 0.4 == pytest.approx(1) == int4[0].get_x()
    assert [bool(bar.get_hatch()) for bar in bf16] == [False, False, True]
    labels = [text.get_text() for text in axes.texts]
    assert labels[1:3] == ["40.0\ntau 1.00", "80.0\ntau 2.30\nsimulated"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["bf16", "int4"]
    assert axes.get_title() == "tiny, T=0; a CPU"


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".SVG", b"<?xml")])
def test_the_chart_lands_as_a_file(tmp_path, suffix, start):
    path = tmp_path / "new" / f"chart{suffix}"
    check_plot(path)
    save_chart(figure(REPORT), path)
    assert path.read_bytes().startswith(start)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["chart.jpg", "chart", ".png"])
def test_suffixes_we_do_not_write(tmp_path, name):
    with pytest.raises(FasteagleError, match=r"suffix '.*': use .png, .svg, .pdf"):
        check_plot(tmp_path / name)


def test_a_place_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FasteagleError, match=r"chart\.png"):
        check_plot(tmp_path / "file" / "chart.png")


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FasteagleError, match=r'pip install "fasteagle\[plot\]"'):
        check_plot(tmp_path / "chart.png")


def test_a_point_stands_in_the_middle_of_its_tenth():
    """Where nothing was drafted there is none."""
    tenths = [(4, 1), (2, 0), *[(0, 0)] * 7, (10, 9)]
    _, line = confidence_figure({"a head": tenths}).axes[0].get_lines()
    assert line.get_label() == "a head"
    assert line.get_xydata().tolist() == [[0.05, 0.25], [0.15, 0.0], [0.95, 0.9]]
