"""Drafters and engines for cycles that our CPU kernels run several at a time."""

from __future__ import annotations

import torch

from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.compile.cpu_cycles import CpuRunner
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.thresholds import Thresholds
from fasteagle.generate import Engine
from fasteagle.loading.source import quantize_head_
from fasteagle.model import Transformer
from fasteagle.options import SamplingParams
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import GatedChain
from helpers import eagle3_of, fused_drafter, random_head

REACH = 7
PARAMS = [
    SamplingParams(),
    SamplingParams(0.8, seed=3),
    SamplingParams(0.9, top_k=9, top_p=0.9, min_p=0.02, seed=5),
    SamplingParams(0.7, repetition_penalty=1.2, seed=6),
    SamplingParams(repetition_penalty=1.3),
]
DRAFTERS = ["plain", "ngram", "eagle1", "eagle3", "fused eagle1", "fused eagle3"]


def head_of(target: Transformer, algorithm: str = "eagle3", **changes):
    eagle3 = eagle3_of(algorithm, target.config, **changes)
    ids = torch.arange(0, 60, 2)
    head = random_head(target, draft_ids=ids, eagle3=eagle3, rope_base=10000.0)
    for linear in (head.fc, head.block.attention.out, head.block.mlp.down):
        linear.weight.data.mul_(0.1)  # not so sure of everything
    quantize_head_(head, Scheme(8, head_bits=8), native=True)
    return head


def drafter_of(target: Transformer, name: str) -> Drafter | None:
    lookup = Lookup(corpus=Corpus([list(range(20, 50))], "cpu"))
    made: Drafter
    match name.split():
        case ["plain"]:
            return None
        case ["ngram", *_]:
            made = NgramDrafter(lookup=lookup)
            made.shape = GatedChain(REACH)
        case ["fused", algorithm]:
            made = fused_drafter(head_of(target, algorithm), GatedChain(REACH), lookup=lookup)
        case [algorithm]:
            made = EagleDrafter(head_of(target, algorithm), GatedChain(REACH))
    made.fixed_thresholds = Thresholds((0.02,) * 8, (0.03,) * 8)
    return made


def engine_of(target: Transformer, drafter: Drafter | None = None) -> Engine:
    return Engine(target, 400, drafter=drafter, backend=CpuBackend(target))


def one_by_one(monkeypatch) -> None:
    monkeypatch.setattr(CpuRunner, "cycles", lambda self, launch: None)


def chunks_of(engine: Engine, params=PARAMS[0], n=90, eos=frozenset(), prompt=(1, 2, 3), **more):
    return list(engine.generate([*prompt], params, n, eos, **more))


def flat(chunks: list[list[int]]) -> list[int]:
    return [token for chunk in chunks for token in chunk]
