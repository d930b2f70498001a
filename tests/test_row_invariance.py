"""A row's logits have the same bits whatever else is verified with it: on a GPU, and on a CPU by
our kernels.

Then greedy text is the same with and without speculation at int4 and int8, bit for bit. bf16 is
not among them: cuBLAS chooses the order of its sums by the number of rows.
"""

from __future__ import annotations

import pytest
import torch

from fasteagle.compile.cuda_blocks import obstacle
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.loading import source
from fasteagle.loading.open import open_model
from fasteagle.options import RuntimeOptions
from fasteagle.quant import cpu_build
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.shapes import TreeShape
from helpers import generated, random_head, save_tiny, verify_rows

LONG = list(range(5, 45))
# All inputs in whole columns of the fused blocks, which is what runs at usual sizes.
SIZES = {"hidden_size": 256, "intermediate_size": 128}
OF_EXPERTS = {"qwen2moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and cpu_build.available("auto") is not None:
        pytest.skip("our CPU kernels do not run here")
    return torch.device(request.param)


MADE = [("llama3", "int4-g32", "auto"), ("llama3", "int8", "auto")]
MADE += [
    ("llama3", "int4-g32", "int8"),
    ("qwen2moe", "int4-g32", "auto"),
    ("olmoe", "int8", "auto"),
]


@pytest.fixture(scope="module", params=MADE, ids=str)
def engine(request, device, tmp_path_factory):
    family, quant, kv = request.param
    if device.type == "cpu" and kv == "int8":
        pytest.skip("attention of the CPU over int8 keys promises nothing")
    if device.type == "cuda" and family == "olmoe":
        pytest.skip("its blocks, with norms of whole queries and keys, are the core's on CUDA")
    sizes = SIZES | OF_EXPERTS.get(family, {})
    folder = save_tiny(tmp_path_factory.mktemp("invariance"), family, **sizes)
    options = RuntimeOptions(device=str(device), quant=quant, max_seq_len=256, kv=kv)
    made = open_model(str(folder)).prepared(options).engine()
    if device.type == "cpu":
        assert made.backend.name == "cpu"
    else:
        assert not made.backend.leaves_blocks, "fused, over 8-bit keys too"
    return made


@pytest.mark.parametrize("family", ["llama3", *OF_EXPERTS])
def test_the_sizes_here_fit_the_fused_blocks(family, tmp_path, monkeypatch):
    """Without a GPU, too: the linears of CUDA on the CPU."""
    monkeypatch.setattr(
        source, "make_linear", lambda weight, bias, *_: InterleavedLinear(weight, bias)
    )
    folder = save_tiny(tmp_path, family, **SIZES | OF_EXPERTS.get(family, {}))
    options = RuntimeOptions("cpu", quant="int4-g32", max_seq_len=256, cpu_kernels="aten")
    made = open_model(str(folder)).prepared(options).engine()
    assert [obstacle(block) for block in made.model.blocks] == [None] * len(made.model.blocks)


def logits_of_a_chain(engine, tokens, T):
    """Logits of the first row of a chain of T of `tokens`, after the prompt."""
    engine.use(None)
    engine.prefill(LONG)
    return verify_rows(engine, tokens[:T], range(-1, T - 1)).logits


def test_logits_do_not_depend_on_the_number_of_rows(engine):
    tokens = list(range(7, 47))
    with torch.no_grad():
        full = logits_of_a_chain(engine, tokens, 32)
        for T in (1, 2, 8, 16, 17):
            assert torch.equal(logits_of_a_chain(engine, tokens, T), full[:T]), T


@pytest.mark.parametrize("shape", [TreeShape(5, 1, 5), TreeShape(4, 4, 31)])
def test_greedy_text_is_that_of_plain_decoding(engine, shape):
    engine.use(None)
    expected = generated(engine, 32, LONG)
    head = random_head(engine.model)
    engine.use(EagleDrafter(head, shape))
    assert generated(engine, 32, LONG) == expected


def test_a_second_turn_is_that_of_plain_decoding(engine):
    """Text and cache, bit for bit, with a prompt that is longer than a tree."""
    turns = list(range(5, 105)), list(range(9, 30))

    def talk(drafter):
        engine.use(drafter)
        engine.restart()
        text = []
        for turn in turns:
            text += turn
            text += generated(engine, 20, text)
        n = len(engine.cached)
        return text, engine.cache.rows[:, :, :n].clone()

    text, rows = talk(None)
    again, same_rows = talk(EagleDrafter(random_head(engine.model), TreeShape(3, 3, 8)))
    assert again == text and torch.equal(same_rows, rows)
