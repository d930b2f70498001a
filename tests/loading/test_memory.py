"""What a model needs of a card's memory, as it is counted before anything is loaded."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from fasteagle import device as devices
from fasteagle.cli.models import memory_cells
from fasteagle.compile import cycles, int8_cache
from fasteagle.decoding.context import MAX_TREE_ROWS, PREFILL_CHUNK_CUDA
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import EngineError, FasteagleError, is_out_of_memory
from fasteagle.llm import open_llm
from fasteagle.loading import checkpoint, make_drafter, memory
from fasteagle.loading import open as opening
from fasteagle.loading import quantize as quantizing
from fasteagle.loading.entries import REGISTRY
from fasteagle.loading.heads.find import head_shape
from fasteagle.loading.make_drafter import Drafting, plan_drafting
from fasteagle.loading.memory import Setting, best_fit, needed_bytes, settings
from fasteagle.loading.names import expected_shapes
from fasteagle.loading.open import OpenedModel, PreparedModel, open_model
from fasteagle.loading.tensors import DummyCheckpoint, weight_bytes
from fasteagle.loading.tokenizer import dummy_tokenizer
from fasteagle.options import DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.paths import cache_dir
from fasteagle.quant.scheme import BF16, INT8, Scheme, int4_for
from fasteagle.shapes import TreeShape
from helpers import generated, raising, random_head, tiny_config

LLAMA = REGISTRY["llama2-7b"].config
GIB = 2**30


def test_constants_are_those_of_the_modules_that_need_torch():
    assert memory.INT8_SPARE == int8_cache.SPARE
    assert memory.CHUNK_ROWS == PREFILL_CHUNK_CUDA
    assert memory.TREE_SLOTS >= MAX_TREE_ROWS
    assert memory.TRACED_SLOTS == cycles.TRACED_SLOTS
    if importlib.util.find_spec("triton"):
        from fasteagle.compile.kernels import tree_kernels

        assert tree_kernels.SPLIT == memory.SPLIT


def test_the_parts_of_7b():
    """6.74 G weights of 2 bytes, 0.5 MiB a cached token, an activation buffer, CUDA."""
    need = needed_bytes(LLAMA, Setting(BF16, "auto", 4096))
    parts = 2 * 6_738_415_616 + 2 * 32 * 32 * 128 * 2 * (4096 + 320 + 512) + memory.CUDA_BYTES
    assert need - parts == 1024 * (2 * 11008 * 6 + 4096 * 8)
    head = needed_bytes(LLAMA, Setting(BF16, "auto", 4096), head_shape("llama2-7b", LLAMA)) - need
    cached = 2 * 32 * 128 * 2 * (4096 + 320 + 512)
    assert head == 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096**2) + cached
    llama, setting = REGISTRY["llama3.1-8b"].config, Setting(BF16, "auto", 128 * 1024)
    shorter = needed_bytes(llama, dataclasses.replace(setting, context=127 * 1024))
    keys, splits = 2 * 32 * 8 * 128 * 2 * 1024, 1024 // memory.SPLIT * 32 * 32 * 128 * 4
    assert needed_bytes(llama, setting) - shorter == keys + splits, "attention in parts, in fp32"
    int4 = int4_for(LLAMA)
    eight, nine = (needed_bytes(LLAMA, Setting(BF16, "auto", 4096), None, n) for n in (8, 9))
    assert eight <= 2 * need < nine
    whole, small = (needed_bytes(LLAMA, Setting(int4, kv, 4096)) for kv in ("auto", "int8"))
    less = 2 * 32 * 32 * (256 - 144) * (4096 + 320 + 512)
    assert whole - small == less - (4096 + 320) * 32 * 128 * 12, "a block's are dequantized"


def test_attention_may_be_what_is_dequantized_for_a_prompt():
    narrow, bf16 = dataclasses.replace(LLAMA, ffn_dim=128), Setting(BF16, "auto", 4096)
    quantized = needed_bytes(narrow, dataclasses.replace(bf16, scheme=INT8))
    dense = needed_bytes(narrow, bf16) - 2 * narrow.params
    assert quantized - INT8.model_bytes(narrow) - dense == 2 * 4096 * 3 * 4096


def test_a_product_of_mixed_bits_runs_in_eight():
    config = tiny_config(n_layer=2)
    shape, rows = expected_shapes(config).__getitem__, Scheme(8, 0, "own")
    mixed = SimpleNamespace(config=config, shape=shape, bits=lambda n: 8 if "v_proj" in n else 4)
    more = weight_bytes(mixed, Scheme(4, 32, "own")) - Scheme(4, 32, "own").model_bytes(config)
    assert more == 2 * config.dim * config.qkv_dim * (1.0625 - 0.625)
    assert weight_bytes(mixed, rows) == rows.model_bytes(config)


def test_the_most_exact_setting_that_fits():
    sizes = [needed_bytes(LLAMA, setting) for setting in settings(LLAMA, 4096)]
    assert sizes == sorted(sizes, reverse=True)
    for setting, size in zip(settings(LLAMA, 4096), sizes, strict=True):
        assert best_fit(LLAMA, size, 4096) == setting
    assert best_fit(LLAMA, sizes[-1] - 1, 4096) is None
    assert [s.context for s in settings(LLAMA, 3000)][3:] == [3000, 1500, 1024]


@pytest.mark.parametrize(
    ("gib", "scheme", "kv", "said"),
    [
        (24, None, "auto", "use --precision int8 --max-seq-len 4096 ("),
        (8, int4_for(LLAMA), "auto", "use --precision int4 --kv int8 --max-seq-len 4096 ("),
        (8, int4_for(LLAMA), "int8", "use --precision int4 --kv int8 --max-seq-len 2048 ("),
        (2, int4_for(LLAMA), "int8", "choose a smaller model"),
    ],
)
def test_what_ran_out_of_memory_is_not_named_again(gib, scheme, kv, said):
    """Even where the estimate says that it fits."""
    assert memory.smaller_fit(LLAMA, gib * GIB, scheme, kv, 4096).startswith(said)


ODD = dataclasses.replace(LLAMA, ffn_dim=17928)  # no multiple of 32: no int4


def test_a_model_that_cannot_have_4_bits_is_not_told_to_use_them(monkeypatch):
    pairs = [(s.precision, s.kv) for s in settings(ODD, 2048)]
    assert pairs == [("bf16", "auto"), ("int8", "auto"), *[("int8", "int8")] * 2]
    assert best_fit(ODD, 2 * GIB, 4096) is None
    assert memory.smaller_fit(ODD, 24 * GIB, None, "auto", 2048).startswith("use --precision int8")
    monkeypatch.setattr(checkpoint, "available_bytes", lambda device: 2 * ODD.params + 2**20)
    with pytest.raises(FasteagleError, match=r"free on cpu: use --precision int8 --max-seq-len"):
        checkpoint.require_memory(ODD, torch.bfloat16, "cpu", 2048)  # the weights alone would fit


@pytest.mark.parametrize(
    ("name", "fitting"),
    [
        ("llama2-7b", {8: "int4", 12: "int8", 24: "bf16"}),
        ("vicuna-33b", {16: "-", 24: "int4", 48: "int8"}),
        ("llama2-70b", {32: "-", 48: "int4", 80: "int8"}),
        ("qwen3-30b-a3b", {16: "-", 24: "int4", 48: "int8", 80: "bf16"}),  # all experts
    ],
)
def test_the_table_by_card(name, fitting):
    cells = dict(zip(memory.CARDS, memory_cells(name)[4:], strict=True))
    assert {size: cells[size] for size in fitting} == fitting


@pytest.mark.parametrize(
    ("gib", "said"),
    [
        (24, "it fits"),
        (12, "qwen3-30b-a3b needs 15.9 GiB of memory .*, 12.0 GiB free on cpu: choose a smaller"),
    ],
)
def test_memory_is_told_before_a_download(monkeypatch, hub_cache, gib, said):
    """Of all experts, whatever a token reads."""
    monkeypatch.setattr(opening, "available_bytes", lambda device: gib * GIB)
    lines: list[str] = []

    def resolve(model):
        raise FasteagleError(lines[-1])  # here it would be fetched

    monkeypatch.setattr(opening.registry, "resolve", resolve)
    options = RuntimeOptions(device="cpu", quant="int4", max_seq_len=2048)
    with pytest.raises(FasteagleError, match=said):
        open_model("qwen3-30b-a3b", options, lines.append)
    assert len(lines) == (gib == 24)


@pytest.mark.parametrize(
    ("dtype", "capabilities", "needs"),
    [
        ("auto", {"avx512_bf16": True}, "13.7 GiB of memory (bf16, 2,048 tokens)"),
        ("auto", {}, "27.4 GiB of memory (fp32, 2,048 tokens)"),
        ("fp32", {"avx512_bf16": True}, "27.4 GiB of memory (fp32, 2,048 tokens)"),
    ],
)
def test_memory_is_told_in_the_dtype_that_will_run(monkeypatch, dtype, capabilities, needs):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(opening, "available_bytes", lambda device: None)
    lines: list[str] = []
    options = RuntimeOptions(device="cpu", dtype=dtype, max_seq_len=2048)
    opening.require_memory_of("vicuna-7b", options, lines.append)
    assert lines == [f"vicuna-7b needs {needs}"]


# Where memory is short after all


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA driver error: out of memory"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
    RuntimeError("std::bad_alloc"),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("out of resource: shared memory, Required: 131072"),  # of Triton, for a kernel
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
    FasteagleError("CUDA out of memory"),
    ValueError("CUDA out of memory"),
]
SHORT = OUT_OF_MEMORY[3]  # which no `except` names


def on_card(opened):
    """`opened` as it would load on a GPU, which need not be there."""
    parts = opened.name, opened.checkpoint, RuntimeOptions(), opened.checkpoint.scheme
    return PreparedModel(*parts, torch.device("cuda"), "bf16")


def test_which_errors_mean_that_memory_is_short():
    assert all(map(is_out_of_memory, [*OUT_OF_MEMORY, MemoryError()]))
    assert not any(map(is_out_of_memory, OTHERS))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


def test_out_of_memory_while_loading_says_what_fits(monkeypatch):
    monkeypatch.setattr(opening, "load_model", raising(SHORT))
    monkeypatch.setattr(devices, "available_bytes", lambda device: 8 * GIB)
    opened = OpenedModel("llama2-7b", DummyCheckpoint(LLAMA), dummy_tokenizer(32000))
    with pytest.raises(FasteagleError) as caught:
        opened.prepared(RuntimeOptions(device="cpu"), lambda line: None).engine()
    assert str(caught.value) == (
        "out of memory while loading, 8.0 GiB free on cpu: use --precision int4 --max-seq-len "
        "4096 (7.0 GiB)"
    )
    monkeypatch.setattr(devices, "available_bytes", lambda device: GIB)
    with pytest.raises(FasteagleError, match="choose a smaller model"):
        opened.prepared(RuntimeOptions(device="cpu"), lambda line: None).engine()


@pytest.mark.parametrize(
    ("drafter", "said"),
    [("auto", "--precision int4 --kv int8 --max-seq-len 4096 ("), ("none", "--precision int4 --m")],
)
def test_what_fits_does_so_beside_the_draft_head(monkeypatch, drafter, said):
    """Where 7B at int4 just fits, its head needs a smaller KV cache."""
    opened = OpenedModel("llama2-7b", DummyCheckpoint(LLAMA), dummy_tokenizer(32000))
    free = needed_bytes(LLAMA, Setting(int4_for(LLAMA), "auto", 4096))
    options = RuntimeOptions(device="cpu")
    head = plan_drafting(DraftOptions(drafter=drafter), opened, options, print).shape
    monkeypatch.setattr(opening, "load_model", raising(SHORT))
    monkeypatch.setattr(devices, "available_bytes", lambda device: free)
    with pytest.raises(FasteagleError) as caught:
        opened.loaded(options, lambda line: None, head)
    assert said in str(caught.value)
    # The same of a model that is loaded: what it has counts as free.
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: free - GIB)
    monkeypatch.setattr(opening, "available_bytes", lambda device: GIB)
    advice = []
    for name in ("load_model", "prove", "Engine"):
        monkeypatch.setattr(opening, name, lambda *args, **more: None)
    monkeypatch.setattr(opening, "choose_backend", lambda *args: advice.append(args[-1]))
    on_card(opened).engine()
    assert said in advice[0](head)


def test_a_chat_leaves_memory_for_the_head_it_will_load(tiny_dir, monkeypatch):
    heads = []
    monkeypatch.setattr(make_drafter, "may_find_head", lambda *args: True)
    monkeypatch.setattr(opening, "load_model", raising(SHORT))
    monkeypatch.setattr(opening, "smaller_fit", lambda *args: heads.append(args[-1]) or "x")
    for drafter in ("eagle", "auto", "ngram"):
        with pytest.raises(FasteagleError, match="free on cpu: x$"):
            draft = DraftOptions(drafter=drafter)
            open_llm(str(tiny_dir), RuntimeOptions(device="cpu"), draft, lambda line: None)
    config = checkpoint.open_checkpoint(tiny_dir).config
    assert heads == [head_shape("tiny", config), None, None]


def test_out_of_memory_for_the_draft_head_says_what_fits(tiny_dir, monkeypatch):
    runtime = open_model(str(tiny_dir)).loaded(RuntimeOptions(device="cpu", max_seq_len=64))
    heads = []
    runtime.engine.backend._advice = lambda head: heads.append(head) or "use --precision int8"
    monkeypatch.setattr(make_drafter, "find_head", raising(SHORT))
    options = DraftOptions(drafter="eagle")
    with pytest.raises(FasteagleError) as caught:
        Drafting(options).drafter("x", runtime.engine, runtime.checkpoint, print)
    assert str(caught.value).startswith("out of memory while loading the draft head, ")
    assert str(caught.value).endswith(
        " GiB free on cpu: use --precision int8, or guess from the context: --drafter ngram"
    )
    assert heads == [head_shape("x", runtime.checkpoint.config)]


def test_what_a_card_cannot_quantize_the_cpu_can(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(quantizing, "save", raising(SHORT))
    monkeypatch.setattr(devices, "available_bytes", lambda device: 8 * GIB)
    scheme, dense = Scheme(4, 32), checkpoint.open_checkpoint(tiny_dir)
    with pytest.raises(FasteagleError) as caught:
        quantizing.write_folder(tmp_path, dense, scheme, torch.device("cuda", 0))
    assert str(caught.value) == (
        "out of memory while quantizing to int4-g32-minmax, 8.0 GiB free on cuda:0: quantize on "
        "the CPU: fasteagle quantize --precision int4-g32-minmax --device cpu"
    )
    opened = opening.open_model(str(tiny_dir))
    with pytest.raises(FasteagleError, match="quantizing to int4-g32-minmax, 8.0 GiB free on cpu"):
        opened.prepared(RuntimeOptions(device="cpu", quant="int4-g32"), lambda line: None)
    assert not list((cache_dir() / "quantized").glob("*"))


def test_out_of_memory_in_a_prompt_leaves_the_engine_usable(tiny_dir, monkeypatch):
    engine = open_model(str(tiny_dir)).loaded(RuntimeOptions(dtype="fp32", max_seq_len=512)).engine
    prompt = [5, 6, 7, 8] * 80
    expected = generated(engine, 8, prompt)
    engine.restart()
    run = engine._run

    def fails(ids, begin, aux_layers):
        if begin:
            raise SHORT
        return run(ids, begin, aux_layers)

    monkeypatch.setattr(engine, "_run", fails)
    line = r"at token 256 of a prompt of 320: lower --max-seq-len \(1,024 tokens fewer free 0\.00 G"
    with pytest.raises(FasteagleError, match=line):
        list(engine.generate(prompt, SamplingParams(), 8))
    monkeypatch.setattr(engine, "_run", run)
    assert generated(engine, 8, prompt) == expected


def test_out_of_memory_in_an_answer_leaves_the_engine_usable(tiny_dir, monkeypatch):
    engine = open_model(str(tiny_dir)).loaded(RuntimeOptions(dtype="fp32", max_seq_len=512)).engine
    engine.use(EagleDrafter(random_head(engine.model), TreeShape(2, 2, 4)))
    expected, heads = generated(engine, 8, [5, 6, 7]), []
    engine.backend._advice = lambda head: heads.append(head) or "use --precision int8"
    with monkeypatch.context() as patch:
        begun = engine.generate([5, 6, 7], SamplingParams(), 8)
        assert next(begun) == expected[:1]
        patch.setattr(engine.runner, "launch", raising(SHORT))
        with pytest.raises(EngineError, match="^out of memory at token 3: use --precision int8$"):
            next(begun)
    assert engine.cached == [] and heads == [engine.drafter.head.config]
    assert generated(engine, 8, [5, 6, 7]) == expected


def test_each_sequence_has_caches_of_its_own():
    """0.5 MiB a token in the target, a 32nd more in the draft head."""
    setting, head = Setting(BF16, "auto", 2048), head_shape("llama2-7b", LLAMA)
    for of, layers in ((None, 32), (head, 33)):
        one, two = (needed_bytes(LLAMA, setting, of, n) for n in (1, 2))
        assert two - one == layers * 2 * 32 * 128 * 2 * (2048 + 320)
        three = needed_bytes(LLAMA, setting, of, 3)
        assert three - two == two - one
