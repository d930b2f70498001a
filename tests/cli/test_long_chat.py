"""Sixty turns at a full context: memory stays, and nothing is compiled again."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from fasteagle.cli.session import ChatSession
from fasteagle.compile.blocks import compile_now, missing_compiler
from fasteagle.compile.costs import follow_costs
from fasteagle.drafting.base import Tuning
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ladder import DEFAULT_RANKS
from fasteagle.generate import Engine
from fasteagle.llm import LLM
from fasteagle.options import AnswerOptions, Defaults
from fasteagle.shapes import TreeShape
from helpers import Letters, costs, random_head, random_target, tiny_config

TURNS, WARM_UP, PART = 140, 80, 20
needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")


def held() -> tuple[int, int, int]:
    """Return what the process holds: bytes of tensors, tensors, and Python objects."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [o for o in objects if type(o) in (torch.Tensor, torch.nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()), len(tensors), len(objects)


@pytest.mark.slow
@needs_compiler
def test_turns_at_a_full_context(tmp_path):
    target = random_target(tiny_config())
    engine = Engine(target, 512)  # this and the tree are compiled for other tests too
    drafter = EagleDrafter(random_head(target), TreeShape(2, 2, 4))
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    engine.use(drafter)
    assert compile_now(engine)
    follow_costs(drafter, costs())
    notes: list[str] = []
    llm = LLM("letters", engine, Letters(60))
    session = ChatSession(llm, Defaults(answer=AnswerOptions(24)), notes.append)

    def ask(turn: int) -> None:
        assert any(piece.text for piece in session.ask(f"question {turn}"))

    for turn in range(WARM_UP):
        ask(turn)
    assert any("context full" in line for line in notes)
    counts = [held()]
    for first in range(WARM_UP, TURNS, PART):
        with torch.compiler.set_stance("fail_on_recompile"):
            for turn in range(first, first + PART):
                ask(turn)
        counts.append(held())
    assert len(engine.cached) > 350
    assert counts[-1][:2] == counts[0][:2]
    # A thread that another test left behind may add objects once; a leak does in every part.
    added = [after[2] - before[2] for before, after in itertools.pairwise(counts)]
    assert min(added) < PART / 2, "an object stays every other turn"
