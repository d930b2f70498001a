"""The gpt-fast row: another process that answers, how it fails, and its place in a table."""

from __future__ import annotations

import multiprocessing

import pytest

from fasteagle.bench.options import BenchOptions
from fasteagle.bench.rivals.gpt_fast import GptFastDecoder, Job, gpt_fast_options, gpt_fast_scheme
from fasteagle.bench.run import run
from fasteagle.errors import FasteagleError
from fasteagle.loading.open import OpenedModel
from fasteagle.loading.registry import preset
from fasteagle.loading.tensors import DummyCheckpoint
from fasteagle.loading.tokenizer import dummy_tokenizer
from fasteagle.options import RuntimeOptions, SamplingParams
from helpers import generated, tiny_config

CONFIG = tiny_config(dim=64, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=128, vocab_size=320)
CPU = RuntimeOptions(device="cpu", max_seq_len=128, cpu_kernels="aten", threads=2)
PROMPT = [5, 6, 7, 8]


def job(**changes) -> Job:
    usual = {"model": "tiny", "dummy": CONFIG, "runtime": CPU, "params": SamplingParams()}
    return Job(**{**usual, "compile": False, **changes})


def opened() -> OpenedModel:
    return OpenedModel("tiny", DummyCheckpoint(CONFIG), dummy_tokenizer(CONFIG.vocab_size))


def test_its_scheme_is_that_of_gpt_fast():
    scheme = gpt_fast_scheme(preset("llama2-7b"))
    assert (scheme.name, scheme.head_bits) == ("int4-g128-minmax", 4)
    options = gpt_fast_options(RuntimeOptions(kv="int8"), preset("llama2-7b"))
    assert (options.backend, options.quant, options.lm_head) == ("torchao", "int4-g128", "int4")
    assert options.kv == "auto"


def test_the_other_process_gives_the_tokens_of_the_same_engine_until_it_dies():
    decoder = GptFastDecoder(job())
    try:
        engine = opened().prepared(gpt_fast_options(CPU, CONFIG), lambda line: None).engine()
        assert "torchao" in type(engine.model.blocks[0].mlp.down.weight).__module__
        for prompt in (PROMPT, PROMPT[::-1]):
            decoder.restart()
            turn = decoder.turn(prompt, 12)
            engine.restart()
            expected = generated(engine, 12, prompt)
            assert turn.tokens == expected and turn.passes == 11
            assert decoder.peak_bytes > 2**20 and len(turn.chunks) == 11
        (process,) = multiprocessing.active_children()
        process.kill()
        with pytest.raises(FasteagleError, match="its process has ended"):
            decoder.turn(PROMPT, 4)
    finally:
        decoder.close()
    assert not multiprocessing.active_children()


def test_what_fails_there_is_told_here(tmp_path):
    with pytest.raises(FasteagleError, match="row gpt-fast: .*no such file or folder"):
        GptFastDecoder(job(model=str(tmp_path / "none"), dummy=None))
    assert not multiprocessing.active_children()


def test_the_row_stands_beside_ours_at_int4():
    options = {"max_new_tokens": 6, "compile": False}
    options = BenchOptions("tiny", ("plain", "gpt-fast"), ("int4",), **options)
    rows = run(options, CPU, opened(), [("one", "and then?")])
    assert [row.name for row in rows] == ["plain", "gpt-fast"]
    for row in rows:
        assert row.precision == "int4" and len(row.turns) == 2 and row.tok_s > 0
    assert rows[1].scheme.name == "int4-g64-minmax" and rows[1].dtype == "bf16"
    assert rows[1].peak_bytes > 2**20
