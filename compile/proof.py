"""Check a backend's kernels against the core on the real weights, before the first answer.

At first use on a device each part computes a few rows by both. If a part differs by more than its
tolerance, or raises, the core runs it on this device, and a line on stderr says so; with `strict`
that is an error. The result is stored in the user cache, with all conditions that it depends on,
unless a part raised, whose reason may pass.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasteagle.decoding.backend import Backend
from fasteagle.decoding.cycle import EAGER
from fasteagle.device import device_name, proc_field
from fasteagle.drafting.base import DraftOps
from fasteagle.drafting.eagle import UNGATED, EagleDrafter
from fasteagle.errors import FasteagleError, first_line, is_out_of_memory, note
from fasteagle.model import EagleHead, Output, PromptView, Target, Visible, causal_mask
from fasteagle.options import SamplingParams
from fasteagle.paths import cache_dir, keep
from fasteagle.quant import cpu_build
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.linear import use_references
from fasteagle.quant.packed import KernelLinear
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import GatedChain, TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import DraftTree, Proposal

ROWS = 4  # rows of each product
COLUMNS = 64  # columns of a product that are compared
TOLERANCE = 0.02  # for products: 8-bit activations, or fp16 accumulation
# Where sums differ in their last bits, activations in 8 bits round otherwise. Tolerances are three
# times the largest error of such activations in the core, of the default model at int4 and int8.
# Weights that enlarge roundings (passes at int4-g64-hqq are off by 0.11) get their own tolerance.
ERRORS, MOST_TOLERANCE = 3, 0.5  # wrong kernels are off by about 1
PASS_TOLERANCE = 0.06  # for logits after all blocks; 16 passes: 0.005 to 0.021
# For experts: of two that score nearly the same a rounding chooses, in some block for most rows.
# The core in bf16 makes roundings that CUDA's kernels do not: a model of two blocks was off by 0.18
# on an H200, and by 0.013 in fp16.
EXPERT_TOLERANCE = 0.3
# For features of a prompt: attention to a few keys enlarges roundings in bf16, by which tiny models
# with random weights are off by 0.11 and 0.17.
PROMPT_TOLERANCE = 0.4
STEP_TOLERANCE = 0.1  # for draft logits; 16 chains of 4 levels: 0.012 to 0.033
CHAIN_TOLERANCE = 0.25  # for path probabilities of 3 levels; 16 chains: 0.003 to 0.085
SLOTS = 256
PREFIX = 16  # committed tokens of the pass
LONG_PREFIX = 80  # of a prompt whose products are cuBLAS's
PENDING = 3  # committed pairs that the draft head reads first
LEVELS = 3  # tokens of the chain that it drafts


@dataclasses.dataclass(frozen=True)
class Check:
    """One part of a backend, computed by the backend and by the core."""

    part: str
    tolerance: float  # of the distance
    compute: Callable[[], tuple[Tensor, Tensor]]  # by the backend, by the core
    module: nn.Module | None = None  # whose rounded products the core computes, too

    def failure(self) -> str | None:
        """Return why the check fails, or None; raise what the part raises."""
        result, expected = self.compute()
        off, most = distance(result, expected), self.tolerance
        if not off <= most and self.module is not None:
            use_references(self.module)
            try:
                _, exact = self.compute()
            finally:
                use_references(self.module, False)
            most = max(most, min(ERRORS * distance(expected, exact), MOST_TOLERANCE))
        return None if off <= most else f"off by {off:.2g}, at most {most:.2g}"


def distance(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of `expected`."""
    result, expected = result.double(), expected.double()
    return float((result - expected).norm() / expected.norm().clamp(min=1e-30))


def prove(backend: Backend, strict: bool = False) -> None:
    """Check each part of `backend`, and let the core run the parts that fail.

    Raises `FasteagleError` for a failure if `strict`.
    """
    if backend.parts:
        _prove(backend, backend.target.model, _conditions(backend), lambda: checks(backend), strict)


def prove_drafting(backend: Backend, head: EagleHead, strict: bool = False) -> None:
    """Check the kernels that run a draft head, as `prove` does."""
    if "products" in backend.left:  # the same kernels were wrong for the target
        use_references(head)
        return
    if "drafting" not in backend.parts:
        return
    conditions = _conditions(backend) | {"head": repr(head.config), "linears": _linears(head)}
    _prove(backend, head, conditions, lambda: drafting_checks(backend, head), strict)


def _prove(
    backend: Backend,
    module: nn.Module,
    conditions: dict[str, Any],
    checked: Callable[[], Iterator[Check]],
    strict: bool,
) -> None:
    """Run the checks unless a result is stored; products of `module` are torch's if they fail."""
    stamp = cache_dir() / "proofs" / f"{_digest(conditions)}.json"
    failures, where = _stored(stamp), f"; kept in {stamp}"
    if failures is None:
        failures, raised = _failures(checked())
        if raised or not keep(stamp, failures, "kernels are checked again next time"):
            where = ""
    for part, reason in failures.items():
        line = f"{part} of backend {backend.name} failed on {device_name(_device(backend))}"
        line = f"{line} ({reason}{where})"
        if strict:
            raise FasteagleError(f"{line}: leave out --strict to run it by torch")
        note(f"warning: {line}: run by torch instead")
        if part in ("products", "drafting"):
            use_references(module)
        backend.leave(part)


def _failures(checks: Iterator[Check]) -> tuple[dict[str, str], bool]:
    """Return why parts fail, and whether one raised; raise only where memory runs out."""
    failures, raised = {}, False
    with torch.no_grad():
        for check in checks:
            if check.part in failures:
                continue
            try:
                reason = check.failure()
            except Exception as error:  # on any other error of a kernel the core still answers
                if is_out_of_memory(error):
                    raise
                reason, raised = first_line(error, 200), True
            if reason is not None:
                failures[check.part] = reason
    return failures, raised


def checks(backend: Backend) -> Iterator[Check]:
    """Yield a check of each part of a target; products come first, since passes use them."""
    model = backend.target.model
    if "products" in backend.parts:
        yield Check("products", TOLERANCE, lambda: _products(model))
    if "passes" in backend.parts:
        is_mixture = backend.target.config.moe is not None
        tolerance = EXPERT_TOLERANCE if is_mixture else PASS_TOLERANCE
        yield Check("passes", tolerance, lambda: _passes(backend), model)
        if backend.name == "cuda":
            yield Check("passes", PROMPT_TOLERANCE, lambda: _prompts(backend), model)
    if "commits" in backend.parts:
        yield Check("commits", 0.0, lambda: _commits(backend))


def drafting_checks(backend: Backend, head: EagleHead) -> Iterator[Check]:
    """Yield the checks of a draft head: its products, its steps, and a chain in one call."""
    yield Check("drafting", TOLERANCE, lambda: _products(head))
    yield Check("drafting", STEP_TOLERANCE, lambda: _steps(backend, head), head)
    yield Check("drafting", CHAIN_TOLERANCE, lambda: _chain(backend, head), head)


def _products(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return a few columns of one product of each kind in `module`, by kernels and in fp32."""
    kinds = {
        (type(m), m.out_features, m.in_features, m.bias is None, _n_bytes(m)): m
        for m in module.modules()
        if isinstance(m, KernelLinear)
    }
    results, references = [], []
    for linear in kinds.values():
        device, N = next(linear.buffers()).device, linear.out_features
        columns = torch.arange(0, N, max(1, N // COLUMNS), device=device)
        weight = linear.rows(columns).float()
        # Of more than 64 rows on CUDA they are cuBLAS's, over weights that a kernel dequantizes.
        for n in (ROWS, *[LONG_PREFIX] * isinstance(linear, InterleavedLinear)):
            x = _random(n, linear.in_features, device=device)
            expected = x @ weight.T
            if linear.bias is not None:
                expected = expected + linear.bias[columns]
            scale = 1 / expected.norm().clamp(min=1e-30)  # each product counts alike
            results.append((scale * linear.exact(x)[:, columns]).flatten())
            references.append((scale * expected).flatten())
    if not results:
        return torch.ones(1), torch.ones(1)
    return torch.cat(results), torch.cat(references)


def _n_bytes(linear: KernelLinear) -> int:
    return sum(buffer.nbytes for buffer in linear.buffers())


def _passes(backend: Backend) -> tuple[Tensor, Tensor]:
    """Return the logits of a small tree after a short text, by the backend and the core.

    Before the tree the core reads the text: random keys and values enlarge roundings.
    """
    core, state = backend.core, _state(backend.core)
    _encode(core, PREFIX, state)
    own = backend.pieces.verify(state, backend.target, _proposal(state))
    return own.logits.float(), EAGER.verify(state, core, _proposal(state)).logits.float()


def _prompts(backend: Backend) -> tuple[Tensor, Tensor]:
    """Return the features of a prompt of more rows than trees have, by the backend and the core.

    On CUDA other kernels than those of trees compute them.
    """
    state, slots = _state(backend.core), torch.arange(LONG_PREFIX, device=_device(backend))
    own = _encode(backend.target, LONG_PREFIX, state, PromptView(LONG_PREFIX, slots))
    return own, _encode(backend.core, LONG_PREFIX, state)


def _encode(target: Target, n: int, state: DecodeState, visible: Visible | None = None) -> Tensor:
    """Return the features [n, D] of a text, and write its keys and values to `state`.

    Without `visible` a mask says what rows see.
    """
    rows = torch.arange(n, device=state.root.device)
    if visible is None:
        visible = causal_mask(0, n, SLOTS, None, rows.device)
    tokens = rows % target.config.vocab_size
    return target.encode(tokens, rows, rows, visible, state.cache)[0].float()


def _steps(backend: Backend, head: EagleHead) -> tuple[Tensor, Tensor]:
    """Return the draft logits along a chain, by the backend's steps and by the core's."""
    drafter, state = _drafting(backend, head)
    tokens = drafter.target_ids[: 1 + LEVELS]
    drafter.run_by(backend.draft_ops(drafter))
    results = _chain_logits(drafter, state, tokens)
    drafter.run_by(DraftOps())
    return results, _chain_logits(drafter, state, tokens)


def _chain(backend: Backend, head: EagleHead) -> tuple[Tensor, Tensor]:
    """Return the path probabilities of a chain, by one call of the backend and by the core.

    The core's are those of its best token after each prefix of the backend's chain: of two tokens
    that are about equally likely, either may be drafted.
    """
    drafter, state = _drafting(backend, head)
    spec = CycleSpec(GatedChain(LEVELS), PENDING, SamplingMode())
    if not backend.drafts(drafter, spec):
        return torch.ones(1), torch.ones(1)
    proposal = backend.pieces.draft(state, drafter, spec)
    tokens = proposal.tree.tokens[1:]
    probabilities = _chain_logits(drafter, state, tokens).softmax(-1)
    ids = torch.searchsorted(drafter.target_ids, tokens)
    own = probabilities[torch.arange(len(tokens)), ids].cumprod(0)
    before = torch.cat((torch.ones_like(own[:1]), own[:-1]))
    return torch.tensor(proposal.promised), before * probabilities.amax(-1)


def _drafting(backend: Backend, head: EagleHead) -> tuple[EagleDrafter, DecodeState]:
    """Return a drafter over `head`, and a state with its first committed pairs pending.

    No probability ends its chains.
    """
    state, drafter = _state(backend.target), EagleDrafter(head, GatedChain(LEVELS))
    drafter.fixed_thresholds = UNGATED
    state.read_aux_layers(drafter.aux_layers, backend.target.config.dim)
    drafter.reserve(PREFIX)
    state.seq_len.fill_(PENDING)
    state.count.fill_(PENDING)
    state.tokens[:PENDING] = drafter.target_ids[:PENDING]
    size = PENDING, state.features.shape[1]
    state.features[:PENDING] = _random(*size, device=state.features.device)
    return drafter, state


def _chain_logits(drafter: EagleDrafter, state: DecodeState, tokens: Tensor) -> Tensor:
    """Return the draft logits [L, V] from which each of the `tokens` [L] of a chain is drafted."""
    logits, features = drafter.extend(state.committed(PENDING), state.seq_len)
    rows, row = [logits], torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
    for level, token in enumerate(tokens[:-1].split(1)):
        path = row[None, : level + 1]
        logits, features = drafter.step(token, features, state.seq_len, level, path, level)
        rows.append(logits)
    return torch.cat(rows).float()


def _commits(backend: Backend) -> tuple[Tensor, Tensor]:
    """Return the results of accepting equal logits, greedy and sampled, by backend and core."""
    vocab_size, results = backend.target.config.vocab_size, []
    for finish in (backend.pieces.finish, EAGER.finish):
        ends = []
        for params in (SamplingParams(), SamplingParams(0.8, seed=3)):
            state = _state(backend.target)
            proposal = _proposal(state)
            state.sampling.load(params)
            spec = CycleSpec(TreeShape(2, 2, 3), 0, SamplingMode.of(params, vocab_size))
            logits = _random(4, vocab_size, device=_device(backend))
            logits[0, proposal.tree.tokens[1]] = 40.0
            finish(state, spec, proposal, Output(logits, logits[:, :1]))
            ends += [state.result, state.text, state.root, state.seq_len.view(1)]
        results.append(torch.cat(ends))
    return results[0], results[1]


def _state(target: Target) -> DecodeState:
    state = DecodeState(target.model, target.new_cache(SLOTS), SLOTS // 2)
    state.seq_len.fill_(PREFIX)
    return state


def _proposal(state: DecodeState) -> Proposal:
    """Return a tree: a root with two children, the first of which has one child."""
    device = state.root.device
    tokens = torch.tensor([0, 1, 2, 1], device=device)
    parents = torch.tensor([0, 0, 0, 1], device=device)
    return Proposal.of(DraftTree(tokens, parents, torch.ones_like(tokens).bool()))


def _random(*size: int, device: torch.device) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device)


def _device(backend: Backend) -> torch.device:
    return backend.target.weight.device


def _conditions(backend: Backend) -> dict[str, Any]:
    """Return the conditions under which the result of a proof is valid."""
    target, device = backend.target, _device(backend)
    return {
        "backend": backend.name,
        "config": repr(target.config),
        "weights": _linears(target.model),
        "dtype": str(target.weight.dtype),
        "cache": str(target.cache_dtype),
        "torch": torch.__version__,
        "sources": _sources(),
        "kernels": _kernels(device),
        "device": device_name(device),
        "flags": proc_field("cpuinfo", "flags", "Features")
        if device.type == "cpu"
        else torch.cuda.get_device_capability(device),
    }


def _kernels(device: torch.device) -> str | None:
    """Return by what kernels are compiled: Triton's version; on a CPU the name of the library."""
    if device.type == "cpu":
        return cpu_build.loaded()
    import triton  # which only CUDA needs

    version: str = triton.__version__
    return version


def _linears(module: nn.Module) -> list[str]:
    """Return the kinds of quantized linears in `module`."""
    linears = (m for m in module.modules() if isinstance(m, KernelLinear))
    return sorted({f"{type(m).__name__} {_n_bytes(m)}" for m in linears})


@cache
def _sources() -> str:
    """Return a digest of the source files of all kernels and backends."""
    digest = hashlib.sha256()
    for package in ("fasteagle.compile", "fasteagle.quant"):
        folder = Path(str(resources.files(package)))
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".cpp", ".h")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(conditions: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:32]


def _stored(stamp: Path) -> dict[str, str] | None:
    """Return the failures of an earlier proof, or None if there is no readable record."""
    try:
        failures = json.loads(stamp.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return failures if isinstance(failures, dict) else None
