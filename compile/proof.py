"""Check a backend's kernels against the core on the real weights, before the first answer.

At first use on a device each part computes a few rows by both. If a part differs by more than its
tolerance, or raises, the core runs it on this device, and a line on stderr says so; with `strict`
that is an error. The result is stored in the user cache, with all conditions that it depends on.
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
from torch import Tensor

from fasteagle.decoding.cycle import EAGER, Proposal
from fasteagle.decoding.runner import Backend
from fasteagle.device import cpu_field, device_name
from fasteagle.errors import FasteagleError, first_line, note
from fasteagle.model import Output, Target
from fasteagle.options import SamplingParams
from fasteagle.paths import cache_dir, write_atomic
from fasteagle.quant.cpu_linear import NativeLinear
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import DraftTree

ROWS = 4  # rows of each product
COLUMNS = 64  # columns of a product that are compared
TOLERANCE = 0.02  # for products: 8-bit activations, or fp16 accumulation
PASS_TOLERANCE = 0.1  # for logits, in which the roundings of all blocks add up
SLOTS = 256
PREFIX = 16  # committed tokens of the pass


@dataclasses.dataclass(frozen=True)
class Check:
    """One part of a backend, computed by the backend and by the core."""

    part: str
    tolerance: float  # norm of the difference, over that of the core's
    compute: Callable[[], tuple[Tensor, Tensor]]  # by the backend, by the core

    def failure(self) -> str | None:
        """Return why the check fails, or None if it passes."""
        try:
            result, expected = (tensor.double() for tensor in self.compute())
        except Exception as error:  # on any error of a kernel the core still answers
            return first_line(error, 200)
        off = float((result - expected).norm() / expected.norm().clamp(min=1e-30))
        return None if off <= self.tolerance else f"off by {off:.2g}, at most {self.tolerance:g}"


def prove(backend: Backend, strict: bool = False) -> None:
    """Check each part of `backend`, and let the core run the parts that fail.

    Raises `FasteagleError` for a failure if `strict`.
    """
    if not backend.parts:
        return
    stamp = cache_dir() / "proofs" / f"{_digest(_conditions(backend))}.json"
    failures = _kept(stamp)
    if failures is None:
        with torch.no_grad():
            results = {check.part: check.failure() for check in checks(backend)}
        failures = {part: reason for part, reason in results.items() if reason is not None}
        write_atomic(stamp, (json.dumps(failures) + "\n").encode())
    for part, reason in failures.items():
        line = f"{part} of backend {backend.name} failed on {device_name(_device(backend))}"
        if strict:
            raise FasteagleError(f"{line} ({reason}): leave out --strict to run it by torch")
        note(f"warning: {line} ({reason}): run by torch instead")
        backend.leave(part)


def checks(backend: Backend) -> Iterator[Check]:
    """Yield a check of each part that kernels run; products come first, since passes use them."""
    if "products" in backend.parts:
        yield Check("products", TOLERANCE, lambda: _products(backend))
    if "passes" in backend.parts:
        yield Check("passes", PASS_TOLERANCE, lambda: _passes(backend))
    if "commits" in backend.parts:
        yield Check("commits", 0.0, lambda: _commits(backend))


def _products(backend: Backend) -> tuple[Tensor, Tensor]:
    """Return a few columns of one product of each kind, by the backend and by the core."""
    kinds = {
        (type(m), m.out_features, m.in_features, m.bias is None, _n_bytes(m)): m
        for m in backend.target.model.modules()
        if isinstance(m, NativeLinear | InterleavedLinear)
    }
    results, references = [], []
    for linear in kinds.values():
        device, N = _device(backend), linear.out_features
        x = _random(ROWS, linear.in_features, device=device)
        columns = torch.arange(0, N, max(1, N // COLUMNS), device=device)
        expected = x @ linear.rows(columns).float().T
        if linear.bias is not None:
            expected = expected + linear.bias[columns]
        scale = 1 / expected.norm()  # each product counts as much as the others
        results.append((scale * linear.exact(x)[:, columns]).flatten())
        references.append((scale * expected).flatten())
    if not results:
        return torch.ones(1), torch.ones(1)
    return torch.cat(results), torch.cat(references)


def _n_bytes(linear: NativeLinear | InterleavedLinear) -> int:
    return sum(buffer.nbytes for buffer in linear.buffers())


def _passes(backend: Backend) -> tuple[Tensor, Tensor]:
    """Return the logits of a small tree after equal keys and values, by backend and core."""
    core, results = backend.core, []
    for target, verify in ((backend.target, backend.pieces.verify), (core, EAGER.verify)):
        state = _state(target)
        tokens = torch.arange(PREFIX, device=_device(backend)) % target.config.vocab_size
        mask = torch.ones(PREFIX, SLOTS, dtype=torch.bool, device=tokens.device).tril()
        slots = torch.arange(PREFIX, device=tokens.device)
        core.encode(tokens, slots, slots, mask, state.cache)
        results.append(verify(state, target, _proposal(state)).logits.float())
    return results[0], results[1]


def _commits(backend: Backend) -> tuple[Tensor, Tensor]:
    """Return the results of accepting equal logits, greedy and sampled, by backend and core."""
    vocab_size, results = backend.target.config.vocab_size, []
    for finish in (backend.pieces.finish, EAGER.finish):
        ends = []
        for params in (SamplingParams(), SamplingParams(0.8, seed=3)):
            state = _state(backend.target)
            proposal = _proposal(state)
            state.sampling.load(params)
            spec = CycleSpec(TreeShape(2, 2, 3), 4, 0, SamplingMode.of(params, vocab_size))
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
    weights = sorted(
        {
            f"{type(m).__name__} {_n_bytes(m)}"
            for m in target.model.modules()
            if isinstance(m, NativeLinear | InterleavedLinear)
        }
    )
    return {
        "backend": backend.name,
        "config": repr(target.config),
        "weights": weights,
        "dtype": str(target.weight.dtype),
        "cache": str(target.cache_dtype),
        "torch": torch.__version__,
        "sources": _sources(),
        "device": device_name(device),
        "flags": cpu_field("flags", "Features")
        if device.type == "cpu"
        else torch.cuda.get_device_capability(device),
    }


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


def _kept(stamp: Path) -> dict[str, str] | None:
    """Return the failures of an earlier proof, or None if there is no readable record."""
    try:
        failures = json.loads(stamp.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return failures if isinstance(failures, dict) else None
