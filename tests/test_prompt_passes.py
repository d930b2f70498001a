"""Which passes compute a prompt, and what a draft head is shown of it."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor

from fasteagle.batch import Batch
from fasteagle.drafting.company import Company
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.generate import Engine
from fasteagle.model import Transformer
from fasteagle.shapes import TreeShape
from helpers import (
    GREEDY,
    PROMPT,
    assert_true_pairs,
    eagle3_of,
    generated,
    raising,
    random_head,
    random_target,
    tiny_config,
)


@pytest.fixture(scope="module", params=["eagle1", "eagle3"])
def head(request, target):
    return random_head(target, eagle3=eagle3_of(request.param, target.config))


@pytest.mark.parametrize("window", [None, 6, 300])
def test_prompts_are_computed_alike_with_and_without_a_draft_head(window, monkeypatch):
    """As on CUDA: cached rows stay as they are, and the same passes compute those after them.

    The pass at the beginning has no mask unless a window cuts it, with and without a draft head.
    """
    target = random_target(tiny_config(sliding_window=window))
    head = random_head(target, sliding_window=None)
    monkeypatch.setattr("fasteagle.decoding.context.PREFILL_CHUNK_CUDA", 300)
    passes = []
    encode = Transformer.encode

    def encoded(model, tokens, positions, slots, visible, *rest):
        keys = visible.shape[1] if isinstance(visible, Tensor) else type(visible).__name__
        passes.append((int(slots[0]), len(slots), keys))
        return encode(model, tokens, positions, slots, visible, *rest)

    def prefilled(drafter):
        engine = Engine(target, 512, drafter=drafter)
        engine.on_cpu = False
        text = PROMPT + generated(engine, 20)
        chunks = []
        for prompt, n_same in ((text + [7] * 400, len(text) - 1), ([*text[:20], 8, 9], 20)):
            rows = engine.cache.rows[:, :, :n_same].clone()
            passes.clear()
            normed, _, n_cached = engine.prefill(prompt)
            assert n_cached == passes[0][0]
            assert torch.equal(engine.cache.rows[:, :, :n_same], rows)
            chunks.append([each for each in passes if each[0] >= n_same])
            assert torch.allclose(normed, Engine(target, 512).prefill(prompt)[0], atol=1e-4)
        engine.restart()
        passes.clear()
        engine.prefill(text + [7] * 400)
        chunks.append(passes.copy())
        # The client leaves in the middle of an answer without drafts: pairs are not shown.
        engine.restart()
        answer = engine.generate(PROMPT, GREEDY, 200, speculate=False)
        with contextlib.closing(answer):
            said = [t for new in itertools.islice(answer, 100) for t in new]
        text = PROMPT + said
        n_same = len(engine.cached)
        rows = engine.cache.rows[:, :, :n_same].clone()
        assert drafter is None or n_same - engine.known > 90
        passes.clear()
        engine.prefill([*text[:n_same], *[7] * 100])
        assert torch.equal(engine.cache.rows[:, :, :n_same], rows)
        return [*chunks, [each for each in passes if each[0] >= n_same]]

    with mock.patch.object(Transformer, "encode", encoded):
        plain = prefilled(None)
        assert prefilled(EagleDrafter(head, TreeShape(3, 4, 7))) == plain
    n = len(PROMPT) + 19
    *follow_ups, first_turn, after_a_stop = plain
    assert len(after_a_stop) == 1 and after_a_stop[0][1] == 100
    after = 512 if window else "PromptView"
    assert follow_ups == [[(n, 300, after), (n + 300, 101, after)], [(20, 2, "TreeView")]]
    beginning = 512 if window == 6 else "PromptView"
    assert first_turn == [(0, 300, beginning), (300, n + 101, after)]


@pytest.mark.parametrize("drafts", [True, False])
def test_a_changed_history_changes_the_pair_before_it(target, head, drafts):
    """The last common token has another one after it, which the draft head must see.

    What it does not see, because nothing is drafted before the change, is not of the first history.
    """
    drafter = EagleDrafter(head, TreeShape(3, 4, 7))
    engine, shown = Engine(target, 512, drafter=drafter), []
    show = drafter.show

    def shows(new, seq_len):
        n = int(new.count)
        positions = range(int(seq_len) - n, int(seq_len))
        shown.extend(zip(positions, new.tokens[:n].tolist(), strict=True))
        show(new, seq_len)

    drafter.show = shows
    first, other = list(range(5, 25)), [*range(5, 15), 40, 41, 42]
    engine.prefill(first)
    assert not shown
    if drafts:
        engine._show_kept(first)
        assert shown == list(enumerate(first[1:]))
        shown.clear()
    assert engine.prefill(other).n_cached == 9
    engine._show_kept(other)
    assert shown == list(enumerate(other[1:]))[9 if drafts else 0 :]


@pytest.mark.parametrize("most", [1024, 40])
def test_the_head_is_shown_a_prompt_when_it_is_to_draft(target, head, most, monkeypatch):
    """Not before the first token, and never in an answer without drafts; but few features wait."""
    monkeypatch.setattr("fasteagle.decoding.context.MOST_KEPT", most)
    monkeypatch.setattr(Engine, "prefill_chunk", 32)
    shown, show = [], EagleDrafter.show

    def noted(drafter, new, seq_len):
        shown.append(int(seq_len))
        show(drafter, new, seq_len)

    monkeypatch.setattr(EagleDrafter, "show", noted)
    engine, prompt = (
        Engine(target, 512, drafter=EagleDrafter(head, TreeShape(3, 4, 7))),
        PROMPT * 12,
    )
    text = prompt + generated(engine, 20, prompt, speculate=False)
    early = [] if most == 1024 else [64, 114]
    assert shown == early and engine.known == len(text) - 2
    text = [*text, 7, 3]
    answer = engine.generate(text, GREEDY, 20)
    first = next(answer)
    assert shown == early
    text = [*text, *first, *itertools.chain.from_iterable(answer)]
    assert shown == [*early, len(prompt) + 21], "all of the prompt but its last pair"
    assert_true_pairs(engine, text, missing=10)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_passes_beside_which_a_head_is_shown_something_are_not_timed(
    target, head, on_cpu, monkeypatch
):
    """Trees that are tried after a rest would seem slow. A device may do it in the next pass."""
    steps, shows = [], []
    drafter = EagleDrafter(head, TreeShape(3, 4, 7))
    shape, show = drafter.shape, EagleDrafter.show

    def noted(own, *rest):
        shows.append(own)
        show(own, *rest)

    def end_passes(company, passes, ms):
        steps.append((passes, len(shows)))
        shows.clear()

    monkeypatch.setattr(EagleDrafter, "show", noted)
    monkeypatch.setattr(EagleDrafter, "next_shape", lambda own: shape if len(steps) > 20 else None)
    monkeypatch.setattr(Company, "end_passes", end_passes)
    several = Batch(Engine(target, 128, drafter=drafter), 2)
    for key in range(2):
        several.begin(key, PROMPT, 64, lambda own: own.generate(PROMPT, GREEDY, 40))
    while several.running:
        several.engines[0].on_cpu = on_cpu or len(steps) < 20
        several.step()
    (at,) = (i for i, (_, n) in enumerate(steps) if n)  # both in one step
    assert [passes for passes, _ in steps[at - 1 : at + 3]] == [1, 0, int(on_cpu), 1]
    assert sum(passes for passes, _ in steps) > 25


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_cycle_that_waits_for_the_head_to_be_shown_something_is_not_timed(target, head, on_cpu):
    """A device does it beside the host, which only sees when the cycle has ended."""
    drafter, outcomes = EagleDrafter(head, TreeShape(3, 4, 7)), []
    drafter.learn = lambda shape, outcome: outcomes.append(outcome)
    engine = Engine(target, 512, drafter=drafter)
    engine.on_cpu = on_cpu
    for prompt in (PROMPT, PROMPT * 3):
        outcomes.clear()
        generated(engine, 20, prompt)
        assert [one.ms is None for one in outcomes] == [not on_cpu] + [False] * (len(outcomes) - 1)


def test_an_answer_is_whole_where_memory_is_short_after_it(target, head, monkeypatch):
    """The next one then computes all again."""
    engine = Engine(target, 512, drafter=EagleDrafter(head, TreeShape(3, 4, 7)))
    expected = generated(engine, 20)
    engine.restart()
    with monkeypatch.context() as short:
        short.setattr(engine, "_keep_pending", raising(torch.OutOfMemoryError("none")))
        assert generated(engine, 20) == expected
    assert not engine.cached and engine.known == 0
    assert generated(engine, 20) == expected
    with monkeypatch.context() as broken:
        broken.setattr(engine, "_keep_pending", raising(RuntimeError("another fault")))
        with pytest.raises(RuntimeError, match="another fault"):
            generated(engine, 20)
