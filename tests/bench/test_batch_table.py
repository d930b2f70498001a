"""Speed of several answers at once."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from fasteagle.answering.several import Answers
from fasteagle.bench import several
from fasteagle.bench.options import BenchOptions


@pytest.fixture
def run(script, questions, tiny_dir, monkeypatch):
    """Runs the script in one round; returns the lines that it prints."""
    monkeypatch.setattr(several, "ROUNDS", 1)

    def run(batch, n_tokens, *words):
        words = ("--batch", batch, "--max-new-tokens", n_tokens, *words)
        done = script("--model", tiny_dir, "--data", questions, *words)
        assert done.exit_code == 0, done.stderr
        return done.stdout.splitlines()

    return run


DENSE = ("--precision", "fp32", "--no-compile", "--md")


def test_a_table_of_sizes(run, tmp_path):
    heading, _, *rows, memory = run("1,2", 6, *DENSE, "--json", tmp_path / "record.json")
    assert heading.startswith("| at once | plain tok/s | x one |")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [(row[0], row[-1]) for row in cells] == [("1", "3 of 3"), ("2", "3 of 3")]
    assert all(float(speed) > 0 for row in cells for speed in row[1:-1])
    assert cells[0][2] == "1.00", "one alone is measured once"
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(row["n"], row["same"], row["precision"]) for row in record["rows"]] == [
        (1, 3, "fp32"),
        (2, 3, "fp32"),
    ]
    assert f"{record['rows'][1]['plain'][0]:.1f}" == cells[1][1]
    assert record["meta"]["max_new_tokens"] == 6
    assert "KV cache; memory is free for" in memory


def test_what_a_barrier_took_is_told(run, tmp_path):
    for threads in (2, 1):
        *_, line = run(2, 3, "--int8", "--json", tmp_path / "r.json", "--threads", threads)
        (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
        assert len(row["barriers"]) == 2 and min(row["barriers"]) > 0
        assert threads == 2 or max(row["barriers"]) < 5, "one thread waits for nobody"
        assert line == "a barrier of the threads: {:.0f} to {:.0f} ns".format(
            *sorted(row["barriers"])
        )


def test_speeds_are_medians_over_plain_decoding_alone_and_beside():
    size = several.Size(4, 3, 10.0, plain=[20.0, 99.0, 22.0], drafting=[33.0, 30.0, 90.0], same=2)
    assert size.cells() == ("4", "22.0", "2.20", "33.0", "3.30", "1.50", "2 of 3")


def test_each_run_computes_its_prompts(run, monkeypatch):
    monkeypatch.setattr(several, "ROUNDS", 2)
    real, cached, drafting = Answers.all, [], []

    def counted(self, requests, size):
        drafting.append({request.speculate for request in requests})
        answers = real(self, requests, size)
        cached.append([answer.stats.cached_tokens for answer in answers])
        return answers

    monkeypatch.setattr(Answers, "all", counted)
    run(3, 3, *DENSE)
    assert drafting == [{False}, *[{False}, {True}] * 4]
    assert not any(counts[0] for counts in cached)
    assert cached[1:5] == cached[5:] and cached[1:4:2] == cached[2:5:2], "in all rounds, both ways"


def test_a_text_that_differs_is_seen(run, monkeypatch):
    real = Answers.all

    def wrong(self, requests, size):
        answers = real(self, requests, size)
        if size > 1:
            answers[0].tokens[0] += 1
        return answers

    monkeypatch.setattr(Answers, "all", wrong)
    (row,) = run(2, 3, *DENSE)[2:-1]  # that of plain decoding alone was not asked for
    assert row.endswith("| 2 of 3 |")


def test_a_card_answers_once_before_it_is_timed(monkeypatch):
    """Graphs are captured then, which takes long."""
    monkeypatch.setattr(several, "ROUNDS", 1)
    clock = itertools.accumulate(ms for took in (9.0,) * 4 + (1.0,) * 4 for ms in (0.0, took))
    monkeypatch.setattr(several, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    options, asked = BenchOptions(temperature=0.7, compile=False), []
    config = SimpleNamespace(vocab_size=100)
    model, backend = SimpleNamespace(config=config), SimpleNamespace(name="cuda")
    llm = SimpleNamespace(
        engine=SimpleNamespace(on_cpu=False, model=model, backend=backend),
        prompt=lambda messages: SimpleNamespace(ids=[1]),
        made_request=lambda ids, params, *_, speculate: asked.append(params),
        answers=SimpleNamespace(
            forget=lambda: None,
            all=lambda requests, size: [SimpleNamespace(tokens=[1, 2]) for _ in requests],
        ),
    )
    (size,) = several.measure_sizes(llm, [["Why?"]], [4], options)
    assert size.plain == size.drafting == [2.0] and size.one == 2.0
    assert len(asked) == 9 and {*asked} == {options.params}


def test_how_many_texts_fit(monkeypatch):
    engine = SimpleNamespace(max_seq_len=1024, slot_bytes=2**20, device="cpu")
    monkeypatch.setattr(several, "available_bytes", lambda device: 5 * 2**29)
    line = several.largest_batch(SimpleNamespace(engine=engine))
    assert line.endswith("1,024 tokens takes 1.00 GiB of KV cache; memory is free for 2 of them")
