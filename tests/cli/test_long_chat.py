"""Hundreds of turns at a full context: memory stays, and nothing is compiled again."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from fasteagle.cli.session import ChatSession
from fasteagle.compile.blocks import missing_compiler
from fasteagle.compile.costs import follow_costs
from fasteagle.drafters import EagleDrafter, Tuning
from fasteagle.drafting.plan import DEFAULT_RANKS
from fasteagle.generate import Engine
from fasteagle.loading.open import compile_now
from fasteagle.options import AnswerOptions, SamplingParams
from fasteagle.tree import TreeShape
from helpers import costs, random_head, random_target, tiny_config

TURNS, WARM_UP = 300, 60
needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")


class Bytes:
    """A tokenizer of letters, which is all that the session needs of one."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [1 + ord(c) % 59 for c in text]

    def decode(self, ids) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    raw = decode

    def render(self, turns) -> str:
        return "".join(turn["content"] for turn in turns)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_turns_at_a_full_context(tmp_path):
    target = random_target(tiny_config())
    engine = Engine(target, 300)
    drafter = EagleDrafter(random_head(target), TreeShape(3, 3, 8), 300)
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    engine.use(drafter)
    assert compile_now(engine)
    follow_costs(engine, drafter, costs())
    notes: list[str] = []
    session = ChatSession(engine, Bytes(), SamplingParams(), AnswerOptions(24), notify=notes.append)
    before = 0
    for turn in range(TURNS):
        if turn == WARM_UP:
            gc.collect()
            before = resident_bytes()
            torch.compiler.set_stance("fail_on_recompile")
        try:
            assert "".join(session.ask(f"question {turn}"))
        finally:
            if turn == TURNS - 1:
                torch.compiler.set_stance("default")
    gc.collect()
    assert any("context full" in line for line in notes)
    assert len(engine.cached) > 200
    assert resident_bytes() < 1.02 * before
