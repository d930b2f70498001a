"""Proofs of backends: kernels made wrong on purpose are left to the core, and a line says so."""

from __future__ import annotations

import dataclasses
import errno
import json

import pytest
import torch
import triton

from fasteagle.compile import cpu_blocks, cpu_draft, cpu_pass, proof
from fasteagle.compile.cpu_backend import CpuBackend, drafts_chains
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.cycle import EAGER
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.llm import open_llm
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.open import open_model
from fasteagle.loading.source import quantize_linear
from fasteagle.model import Target
from fasteagle.options import DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.paths import cache_dir
from fasteagle.quant import cpu_build
from fasteagle.quant.cpu_linear import NativeLinear
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import GatedChain
from helpers import generated, random_head, spec_of, tiny_config
from native_models import MIXTRAL, SHAPE, native_head, native_target

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture
def model():
    return native_target(tiny_config(**SHAPE, qkv_bias=True))


def answer(backend, drafter=None) -> list[int]:
    return generated(Engine(backend.target.model, 128, drafter=drafter, backend=backend), 20)


def wrong_pass(self, state, target, proposal):
    output = cpu_pass.EAGER.verify(state, target, proposal)
    return output._replace(logits=output.logits.flip(-1))


def nan_pass(self, state, target, proposal):
    output = cpu_pass.EAGER.verify(state, target, proposal)
    return output._replace(logits=output.logits * float("nan"))


def blind_pass(self, state, target, proposal):
    """Pass that sees nothing of the text before the tree."""
    length = state.seq_len.clone()
    state.seq_len.zero_()
    output = cpu_pass.EAGER.verify(state, target, proposal)
    state.seq_len.copy_(length)
    return output


def raising(*args):
    raise RuntimeError("illegal instruction\nmore")


def test_kernels_that_are_right_are_used_and_proved_once(model, monkeypatch, capsys):
    backend = CpuBackend(model)
    proof.prove(backend, strict=True)
    assert backend.left == set() and "by torch" not in backend.describe()
    monkeypatch.setattr(proof, "checks", raising)  # the second time nothing is computed
    proof.prove(CpuBackend(model))
    proof.prove(Backend(Target(model)), strict=True)  # the core has nothing to prove
    assert capsys.readouterr().err == ""


def test_a_linear_of_zeros_is_no_failure(model):
    """As in blocks that were added to a model and begin as the identity."""
    attention = model.blocks[-1].attention
    size = attention.out.in_features, attention.out.out_features
    zeros = torch.nn.Linear(*size, bias=False).requires_grad_(False)
    zeros.weight.zero_()
    attention.out = quantize_linear(zeros, Scheme(4, 32), native=True)
    backend = CpuBackend(model)
    proof.prove(backend, strict=True)
    assert backend.left == set()


@pytest.mark.parametrize("wrong", [wrong_pass, nan_pass, blind_pass])
def test_a_wrong_pass_is_the_cores(model, wrong, monkeypatch, capsys):
    """And the line names the file that keeps the failure."""
    with monkeypatch.context() as patch:
        patch.setattr(cpu_pass.NativePass, "__call__", wrong)
        for _ in range(2):  # computed, and stored
            backend = CpuBackend(model)
            proof.prove(backend)
            line = capsys.readouterr().err
            assert line.startswith("warning: passes of backend cpu failed on") and "off by" in line
            (stamp,) = (cache_dir() / "proofs").iterdir()
            assert f"; kept in {stamp})" in line and line.count("\n") == 1
            assert "passes by torch" in backend.describe()
            assert answer(backend) == answer(Backend(Target(model)))
    stamp.unlink()
    proof.prove(CpuBackend(model), strict=True)


def test_weights_that_enlarge_roundings_have_their_own_tolerance(model, monkeypatch):
    monkeypatch.setattr(proof, "PASS_TOLERANCE", 0.0)
    proof.prove(CpuBackend(model), strict=True)
    assert not any(getattr(module, "_by_reference", False) for module in model.modules())
    monkeypatch.setattr(proof, "ERRORS", 0)
    with pytest.raises(FasteagleError, match="passes of backend cpu .*off by"):
        proof.prove(CpuBackend(native_target(model.config, bits=8)), strict=True)


@pytest.mark.parametrize("damaged", ["", "[]", "null", "{"])
def test_a_damaged_record_is_made_again(model, damaged):
    for content in ("{}", damaged, "{}"):
        proof.prove(CpuBackend(model), strict=True)
        (stamp,) = (cache_dir() / "proofs").iterdir()
        assert json.loads(stamp.read_text()) == {}
        stamp.write_text(content)


def test_what_raises_is_tried_again_at_the_next_start(model, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(cpu_pass.NativePass, "__call__", raising)
        backend = CpuBackend(model)
        proof.prove(backend)
        assert backend.left == {"passes"} and "kept in" not in capsys.readouterr().err
    backend = CpuBackend(model)
    proof.prove(backend)
    assert backend.left == set() and capsys.readouterr().err == ""


def test_short_memory_is_no_failure_of_a_kernel(model, monkeypatch):
    def short(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096")

    monkeypatch.setattr(cpu_pass.NativePass, "__call__", short)
    backend = CpuBackend(model)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        proof.prove(backend)
    assert backend.left == set() and not (cache_dir() / "proofs").exists()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_full_disk_costs_only_the_record(model, monkeypatch, capsys, wrong):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fasteagle.paths.write_atomic", full)
    if wrong:
        monkeypatch.setattr(cpu_pass.NativePass, "__call__", wrong_pass)
    backend = CpuBackend(model)
    proof.prove(backend)
    lines = capsys.readouterr().err.splitlines()
    assert "(No space left on device): kernels are checked again next time" in lines[0]
    assert lines[0].startswith("warning: ") and len(lines) == 1 + wrong
    assert backend.left == ({"passes"} if wrong else set())


def test_another_library_or_another_triton_is_proved_too(model, monkeypatch):
    names = {cpu_build.library_path(isa).name for isa in cpu_build.runnable()}
    assert cpu_build.loaded() in names
    backend = CpuBackend(model)
    digests = {proof._digest(proof._conditions(backend))}
    monkeypatch.setattr(cpu_build, "loaded", lambda: "avx2-0123.so")
    digests.add(proof._digest(proof._conditions(backend)))
    assert len(digests) == 2
    assert proof._kernels(torch.device("cuda")) == triton.__version__


def test_each_condition_of_a_proof_counts(model, monkeypatch, tmp_path):
    """A record of other kernels, weights or machines proves nothing."""
    backend, digests = CpuBackend(model), []

    def note_conditions(of: CpuBackend = backend) -> None:
        digests.append(proof._digest(proof._conditions(of)))

    note_conditions()
    note_conditions(CpuBackend(native_target(tiny_config(**SHAPE | dict(norm_eps=1e-6)))))
    note_conditions(CpuBackend(native_target(model.config, bits=8)))
    target = backend.target
    backend.target = dataclasses.replace(target, cache_dtype=torch.int8)
    note_conditions()
    model.norm.bfloat16()
    model.embedding.bfloat16()
    note_conditions()
    monkeypatch.setattr(proof, "proc_field", lambda *names: "mmx")
    note_conditions()
    monkeypatch.setattr(proof, "device_name", lambda device: "i386")
    note_conditions()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    note_conditions()
    monkeypatch.setattr(proof, "_sources", proof._sources.__wrapped__)  # read once else
    monkeypatch.setattr(proof.resources, "files", lambda package: tmp_path)
    for suffix in (".py", ".cpp", ".h"):
        (tmp_path / f"kernels{suffix}").write_text(suffix)
        note_conditions()
    assert len({*digests}) == len(digests)


def test_a_head_of_another_config_is_proved_too(model, monkeypatch):
    proved = []
    monkeypatch.setattr(proof, "drafting_checks", lambda _, head: iter(proved.append(head) or ()))
    for base in (1e4, 1e4, 5e5):
        head = native_head(model, rope_base=base)
        proof.prove_drafting(CpuBackend(model), head)
    assert [head.config.block.rope_base for head in proved] == [1e4, 5e5]


def test_a_wrong_product_among_larger_ones_is_seen(monkeypatch):
    linears = torch.nn.ModuleList()
    for n, size in ((96, 1e3), (64, 1.0)):
        linear = torch.nn.Linear(64, n, bias=False).requires_grad_(False)
        linear.weight *= size
        linears.append(quantize_linear(linear, Scheme(4, 32), native=True))
    check = proof.Check("products", proof.TOLERANCE, lambda: proof._products(linears))
    assert check.failure() is None
    product = NativeLinear._product
    monkeypatch.setattr(
        NativeLinear, "_product", lambda self, x: product(self, x) * (self.out_features != 64)
    )
    assert "off by" in check.failure()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("wrong", [False, True])
def test_wrong_experts_are_the_cores(bits, wrong, monkeypatch, capsys):
    model = native_target(tiny_config(**MIXTRAL), bits)
    tensors = cpu_blocks.expert_tensors

    def other_experts(mlp):
        made = tensors(mlp)
        return made | {"router": made["router"].roll(1, 0)}

    if wrong:
        monkeypatch.setattr(cpu_blocks, "expert_tensors", other_experts)
    backend = CpuBackend(model)
    proof.prove(backend)
    line = capsys.readouterr().err
    assert ("passes of backend cpu failed" in line) == ("passes" in backend.left) == wrong
    assert not wrong or answer(backend) == answer(Backend(Target(model)))


def long_end(self, state, spec, proposal, output):
    """End of a cycle that counts a token too many where tokens are drawn."""
    EAGER.finish(state, spec, proposal, output)
    state.seq_len += not spec.kind.greedy


@pytest.mark.parametrize(("wrong", "reason"), [(raising, "illegal inst"), (long_end, "off by")])
def test_a_wrong_end_of_a_cycle_is_the_cores(model, wrong, reason, monkeypatch, capsys):
    monkeypatch.setattr(cpu_pass.NativeFinish, "__call__", wrong)
    backend = CpuBackend(model)
    proof.prove(backend)
    assert "commits of backend cpu" in (line := capsys.readouterr().err)
    assert f"({reason}" in line and backend.left == {"commits"}
    assert len(answer(backend)) == 20
    with pytest.raises(FasteagleError, match=r"commits of backend cpu .*leave out --strict"):
        proof.prove(CpuBackend(model), strict=True)


def test_wrong_products_are_computed_in_torch(model, monkeypatch, capsys):
    expected = answer(CpuBackend(model))
    exact = NativeLinear.exact

    def wrong(self, x):
        y = exact(self, x)
        return y if self._by_reference else torch.zeros_like(y)

    monkeypatch.setattr(NativeLinear, "exact", wrong)
    backend = CpuBackend(model)
    proof.prove(backend)
    assert "products of backend cpu" in capsys.readouterr().err
    assert backend.left >= {"products", "passes"}
    assert answer(backend)[:3] == expected[:3], "but for the rounding of activations"


@pytest.fixture(params=["eagle1", "eagle3"])
def drafter(request, model):
    return EagleDrafter(native_head(model, request.param), GatedChain(4))


def test_products_that_are_wrong_are_torchs_in_the_head_too(model, drafter, monkeypatch):
    monkeypatch.setattr(proof, "drafting_checks", raising)
    backend = CpuBackend(model)
    backend.left.add("products")
    proof.prove_drafting(backend, drafter.head, strict=True)
    linears = [m for m in drafter.head.modules() if isinstance(m, NativeLinear)]
    assert linears and all(linear._by_reference for linear in linears)


def failing(*args):
    yield proof.Check("drafting", 0.0, lambda: (torch.zeros(1), torch.ones(1)))
    yield proof.Check("drafting", 0.0, raising)


def test_drafting_that_is_right_is_used_and_proved_once(model, drafter, monkeypatch, capsys):
    backend = CpuBackend(model)
    proof.prove_drafting(backend, drafter.head, strict=True)
    assert backend.left == set() and backend.drafts(drafter, spec_of(drafter.shape))
    monkeypatch.setattr(proof, "drafting_checks", raising)
    proof.prove_drafting(CpuBackend(model), drafter.head)
    proof.prove_drafting(Backend(Target(model)), drafter.head)
    assert capsys.readouterr().err == ""
    backend.leave("passes")
    assert torch.equal(*proof._chain(backend, drafter.head)), "the core drafts"


def test_a_head_in_other_bits_is_proved_too(model, monkeypatch, capsys):
    """Its kernels are others, though its config is the same."""
    for bits in (8, 4):
        proof.prove_drafting(CpuBackend(model), native_head(model, bits=bits))
        line = capsys.readouterr().err
        assert ("drafting of backend cpu" in line) == ("(off by 1, at most 0;" in line)
        assert bool(line) == (bits == 4)
        monkeypatch.setattr(proof, "drafting_checks", failing)


@pytest.mark.parametrize("part", ["passes", "drafting"])
def test_where_kernels_fail_another_shape_is_chosen(tiny_dir, tmp_path, part, monkeypatch):
    """Only the kernels draft looked-up chains."""
    if part == "passes":
        monkeypatch.setattr(cpu_pass.NativePass, "__call__", wrong_pass)
    options = RuntimeOptions(device="cpu", dtype="fp32", quant="int8", max_seq_len=128)
    draft = DraftOptions("ngram")
    if part == "drafting":
        monkeypatch.setattr(cpu_draft.NativeChain, "draft", raising)
        runtime = open_model(str(tiny_dir), options).loaded(options)
        head = random_head(runtime.engine.model, rope_scaling=None, rope_base=10000.0)
        save_head(tmp_path / "head", head, {}, torch.float32)
        draft = DraftOptions("fused", str(tmp_path / "head"))
    llm = open_llm(str(tiny_dir), options, draft, lambda line: None)
    assert llm.engine.backend.left == {part}
    assert not isinstance(llm.engine.drafter.shape, GatedChain)
    assert sum(len(new) for new in llm.engine.generate([5, 6, 7, 5, 6], SamplingParams(), 9)) == 9


def other_tokens(self, *args):
    tokens, paths = self.right(*args)
    return (tokens + 1) % 60, paths


def no_history(self, state, drafter, *args):
    """The chain of a draft head that sees nothing but the last pair."""
    count = state.count.clone()
    state.count.fill_(1)
    tokens, paths = self.right(state, drafter, *args)
    state.count.copy_(count)
    return tokens, paths


@pytest.mark.parametrize("wrong", [other_tokens, no_history, raising])
def test_a_wrong_chain_is_the_cores(model, drafter, wrong, monkeypatch, capsys):
    expected = answer(CpuBackend(model))
    chain = cpu_draft.NativeChain
    monkeypatch.setattr(chain, "right", chain.draft, raising=False)
    monkeypatch.setattr(chain, "draft", wrong)
    for _ in range(2):  # computed, and stored
        backend = CpuBackend(model)
        proof.prove_drafting(backend, drafter.head)
        line = capsys.readouterr().err
        assert line.startswith("warning: drafting of backend cpu failed on")
        assert line.count("\n") == 1 and "drafting by torch" in backend.describe()
        assert not backend.drafts(drafter, spec_of(drafter.shape))
        assert answer(backend, drafter) == expected
    with pytest.raises(FasteagleError, match=r"drafting of backend cpu .*leave out --strict"):
        proof.prove_drafting(CpuBackend(model), drafter.head, strict=True)


def test_a_wrong_step_of_a_draft_head_is_the_cores(model, drafter, monkeypatch, capsys):
    monkeypatch.setattr(cpu_blocks.NativeBlocks, "run_alone", lambda self, x, *rest: x.roll(1, -1))
    backend = CpuBackend(model)
    proof.prove_drafting(backend, drafter.head)
    assert "drafting of backend cpu" in capsys.readouterr().err
    assert backend.step(drafter.head) is None and backend.left == {"drafting"}
    linears = [m for m in drafter.head.modules() if isinstance(m, NativeLinear)]
    assert linears and all(linear._by_reference for linear in linears)


def test_what_is_left_to_the_core_is_no_more_than_fails(model):
    for part in ("products", "passes"):
        backend = CpuBackend(model)
        backend.leave(part)
        assert backend.pieces == EAGER._replace(finish=backend.pieces.finish) != EAGER
        assert not drafts_chains(backend)
    backend.leave("commits")
    assert backend.pieces == EAGER
    backend = CpuBackend(model)
    made = backend.pieces
    backend.leave("commits")
    assert (
        backend.pieces == made._replace(finish=EAGER.finish) and backend.target is not backend.core
    )
    backend.leave("drafting")
    assert backend.pieces == EAGER._replace(verify=made.verify)
