"""On a card: several texts that share passes, and answers while code is compiled."""

from __future__ import annotations

import itertools
import time

import pytest

from fasteagle.batch import Batch
from fasteagle.bench.row_spec import RowSpec
from fasteagle.bench.simulate import dummy_drafter
from fasteagle.compile.blocks import compile_now
from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.drafting.lookup import Lookup
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.llm import open_llm
from fasteagle.loading.open import open_dummy
from fasteagle.loading.registry import local_path
from fasteagle.options import DEFAULT_MODEL, DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.shapes import TreeShape
from helpers import finished

pytestmark = pytest.mark.gpu
N_TEXTS, PATIENCE = 4, 180.0  # seconds of compiling
ROWS = ("none", "ngram", "eagle@3/2/5", "fused@3/2/5/4")
CASES = [*itertools.product(("captured", "compiled"), ROWS), ("captured", "draft model")]


@pytest.fixture(scope="module")
def prepared():
    options = RuntimeOptions(device="cuda", max_seq_len=256).at("int4")
    return open_dummy(DEFAULT_MODEL).prepared(options)


@pytest.fixture(scope="module")
def engine(prepared):
    return prepared.engine()


def drafter_of(row: str, prepared, engine):
    if row == "none":
        return None
    if row == "ngram":
        return NgramDrafter(4, Lookup(device=engine.device))
    if row == "draft model":  # the target itself: all is accepted
        vocab_size = engine.model.config.vocab_size
        return ModelDrafter(engine.target, TreeShape(3, 2, 5), vocab_size)
    options = RowSpec.parse(row).draft_options(DraftOptions())
    return dummy_drafter(DEFAULT_MODEL, engine, prepared.checkpoint, options)


@pytest.mark.parametrize(("how", "row"), CASES)
def test_texts_written_together_are_those_written_alone(prepared, engine, how, row):
    engine.use(drafter_of(row, prepared, engine))
    for temperature in (0, 0.8):
        assert how == "captured" or compile_now(engine, SamplingParams(temperature))
        params = [SamplingParams(0.8 if i == 1 else temperature, seed=i) for i in range(N_TEXTS)]

        def ask(own, i, params=params):
            return own.generate([5, 6, 7] * (3 + i), params[i], 24)

        alone = [[t for new in ask(engine, i) for t in new] for i in range(N_TEXTS)]
        several = Batch(engine, N_TEXTS)
        for i in range(N_TEXTS):
            several.begin(i, [5], 64, lambda own, i=i: ask(own, i))
        assert [*finished(several).values()] == alone
        assert {own.runner.error for own in several.engines} == {None}
    assert engine.backend.shares_passes


@pytest.mark.real_model
@pytest.mark.skipif(local_path(DEFAULT_MODEL) is None, reason="the default model is not here")
def test_answers_go_on_while_code_is_compiled_in_the_background():
    """Print the seconds of each answer."""
    llm = open_llm(DEFAULT_MODEL, RuntimeOptions(device="cuda"), DraftOptions(), print)
    llm.prepare(SamplingParams(), quiet=False)
    texts, busy, end = [], True, time.monotonic() + PATIENCE
    while busy and time.monotonic() < end:
        busy = llm.is_preparing
        begin = time.perf_counter()
        texts.append(llm.chat("Name the capitals of Europe.", max_new_tokens=64).text)
        print(f"{time.perf_counter() - begin:.2f} s, preparing: {busy}")
    assert llm.engine.runner.error is None and len(set(texts)) == 1
    llm.close()  # a thread that compiles may not be there when the interpreter ends
