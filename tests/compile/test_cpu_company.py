"""Cycles of several texts by one call of our CPU kernels."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fasteagle.batch import Batch
from fasteagle.compile import cpu_cycles
from fasteagle.compile.cpu_cycles import MOST_CYCLES, NativeCycles
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.shapes import TreeShape
from helpers import Even
from native_cycles import (
    DRAFTERS,
    PARAMS,
    chunks_of,
    drafter_of,
    engine_of,
    flat,
    head_of,
    one_by_one,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels", "any_time")


def in_company(batch: Batch, starts, joins=()) -> dict[int, list[int]]:
    """Return the texts that `starts` begin at once; those in `joins` begin when 20 tokens are."""
    texts: dict[int, list[int]] = {key: [] for key in range(len(starts))}
    later = list(joins)
    for key in set(texts) - set(joins):
        batch.begin(key, [1], 100, starts[key])
    while batch.running:
        for key, chunk in batch.step():
            assert not isinstance(chunk, Exception), chunk
            texts[key] += chunk or []
        if later and max(map(len, texts.values())) > 20:
            batch.begin(key := later.pop(), [1], 100, starts[key])
    return texts


def writing(prompt, params=PARAMS[0], n=90, **more):
    return lambda own: own.generate(prompt, params, n, **more)


JOINT = [(name, PARAMS[(2 * i + j) % 5]) for i, name in enumerate(DRAFTERS) for j in range(2)]


@pytest.mark.parametrize(("name", "params"), JOINT, ids=str)
def test_texts_that_share_passes_share_calls(native, name, params, calls, monkeypatch):
    """Texts, drafts and caches are those of one pass a call, bit for bit."""
    prompts = [[1, 2, 3], [4, 5, 6, 7, 4, 5], [9, 8], [11, 30, 31, 32]]
    kinds = [params, PARAMS[0], params, PARAMS[1]]
    starts = [
        writing(p, kind, 60 + 5 * i) for i, (p, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    records = []
    for apart in (False, True):
        if apart:
            one_by_one(monkeypatch)
        calls.clear()
        batch = Batch(engine_of(native, drafter_of(native, name)), 4)
        texts = in_company(batch, starts)
        assert apart or max(calls) == MOST_CYCLES
        for i, own in enumerate(batch.engines):
            n = len(own.cached)
            tensors = [own.cache.rows[:, :, :n]]
            if own.drafter is not None:
                tensors += [cache.rows[:, :, : own.shown] for cache in own.drafter.caches]
            counts = own.stats.passes, own.stats.drafted, own.stats.path_lengths
            records.append((texts[i], counts, own.shown, [tensor.clone() for tensor in tensors]))
    half = len(records) // 2
    for one, two in zip(records[:half], records[half:], strict=True):
        assert one[:3] == two[:3] and all(map(torch.equal, one[3], two[3]))
    alone = [
        flat(chunks_of(engine_of(native), kinds[i], 60 + 5 * i, prompt=prompts[i]))
        for i in range(4)
    ]
    assert [record[0] for record in records[:half]] == alone


def test_a_text_that_ends_ends_a_call_for_all(native, calls):
    """By a token, by its length, by what only the host knows; the others go on."""
    prompts = [[1, 2, 3], [4, 5, 6], [9, 8], [7, 7]]
    expected = [flat(chunks_of(engine_of(native), prompt=prompt)) for prompt in prompts]
    last = next(i for i in range(20, 90) if expected[1][i] not in expected[1][:i])
    count = iter(range(200))
    starts = [
        writing(prompts[0], n=33),
        writing(prompts[1], eos_ids=frozenset((expected[1][last],))),
        writing(prompts[2], is_last=lambda token: next(count) == 40),
        writing(prompts[3]),
    ]
    batch = Batch(engine_of(native), 2)
    in_company(batch, [writing(prompts[3]), starts[1]])
    ended = batch.engines[1]
    assert int(ended.state.seq_len) == len(ended.cached), "no cycle is run after the end"
    texts = in_company(Batch(engine_of(native, drafter_of(native, "fused eagle3")), 4), starts)
    ends = 33, last + 1, 41, 90
    assert [*texts.values()] == [text[:n] for text, n in zip(expected, ends, strict=True)]
    assert max(calls) == MOST_CYCLES


def test_texts_that_are_not_alike_share_single_passes(native, calls):
    """A grammar is asked before each token; a text without drafts has other cycles."""
    prompts = [[1, 2, 3], [4, 5, 6], [9, 8]]
    even = flat(chunks_of(engine_of(native), prompt=prompts[1], processor=Even()))
    expected = [flat(chunks_of(engine_of(native), prompt=prompt)) for prompt in prompts]
    expected[1] = even[:30]
    starts = [
        writing(prompts[0]),
        writing(prompts[1], n=30, processor=Even()),
        writing(prompts[2], n=50, speculate=False),
    ]
    expected[2] = expected[2][:50]
    batch = Batch(engine_of(native, drafter_of(native, "fused eagle3")), 3)
    texts = in_company(batch, starts)
    assert [*texts.values()] == expected and max(calls) == MOST_CYCLES, "the last one is alone"
    assert [bool(own.stats.drafted) for own in batch.engines] == [True, True, False]


def test_a_text_without_drafts_leaves_the_other_its_own(native):
    drafted = []
    for speculate in (False, True):
        batch = Batch(engine_of(native, drafter_of(native, "fused eagle3")), 2)
        in_company(batch, [writing([1, 2, 3]), writing([9, 8], speculate=speculate)])
        drafted.append([own.stats.drafted for own in batch.engines])
    assert drafted[0] == [drafted[1][0], 0] and drafted[1][1] > 0


def test_cycles_that_no_call_runs_share_passes(native, calls):
    """Trees; the last text goes on alone."""
    prompts = [[1, 2, 3], [4, 5, 6], [9, 8]]
    expected = [flat(chunks_of(engine_of(native), prompt=prompt)) for prompt in prompts]
    calls.clear()
    tree = EagleDrafter(head_of(native, "eagle1"), TreeShape(2, 2, 4))
    engine = engine_of(native, tree)
    starts = [writing(prompts[i], n=(90, 20, 40)[i]) for i in range(3)]
    texts = in_company(Batch(engine, 3), starts, joins=(2,))
    assert [*texts.values()] == [expected[0], expected[1][:20], expected[2][:40]] and not calls


def test_a_text_that_is_joined_shares_the_next_pass(native):
    """Cycles that it had launched alone wait for the other text's."""
    several, passes = Batch(engine_of(native), 2), []
    run = cpu_cycles.run_queued

    def counted(runners):
        n = run(runners)
        passes.append((len(runners), n))
        return n

    with mock.patch.object(cpu_cycles, "run_queued", counted):
        several.begin(0, [1], 100, writing([1, 2, 3]))
        while len(passes) < 4:
            several.step()
        assert {*passes[1:]} == {(1, MOST_CYCLES)}
        several.begin(1, [1], 100, writing([4, 5, 6], n=40))
        several.step()
        passes.clear()
        several.step()
        several.step()
    assert [n for n, _ in passes] == [2, 2]


def test_a_text_whose_passes_are_single_ones_launches_no_cycles_ahead(native):
    """It had done so alone; what is launched late is chosen by all that was learned."""
    several = Batch(engine_of(native), 2)
    several.begin(0, [1], 100, writing([1, 2, 3]))
    runner = several.engines[0].runner
    while runner.at_once < MOST_CYCLES:
        several.step()
    several.begin(1, [1], 100, writing([4, 5, 6], processor=Even()))
    for _ in range(MOST_CYCLES + 2):
        several.step()
    assert len(several.running) == 2 and len(runner.queued) == 1


def test_a_call_that_fails_ends_all_its_texts(native, monkeypatch):
    batch = Batch(engine_of(native), 2)
    for key in range(2):
        batch.begin(key, [1], 100, writing([1 + key, 2, 3]))
    batch.step()
    batch.step()
    monkeypatch.setattr(NativeCycles, "run", mock.Mock(side_effect=RuntimeError("broken")))
    errors = [item for _ in range(9) for _, item in batch.step() if isinstance(item, Exception)]
    assert len(errors) == 2 and not batch.running and "broken" in str(errors[0])
