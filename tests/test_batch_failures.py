"""Several texts at once of which some fail: the others go on, and later ones are whole."""

from __future__ import annotations

import gc

from fasteagle import batch
from fasteagle.batch import Batch
from fasteagle.errors import EngineError
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from helpers import finished, raising, random_target, tiny_config
from test_batch import alone, begin


def test_a_pass_that_fails_ends_each_answer_by_its_reason(monkeypatch):
    engine = Engine(random_target(tiny_config()), 128)
    several = Batch(engine, 2)
    for key in range(2):
        begin(several, key, ([9, 10], SamplingParams(), 20))
    while len(several.step()) < 2:
        pass

    error = RuntimeError("a broken pass")
    monkeypatch.setattr(type(engine.backend), "verify_together", raising(error))
    ended = dict(several.step())
    assert list(ended) == [0, 1] and not several.running
    assert all(str(error) == "a broken pass" for error in ended.values())


def test_an_error_at_the_end_of_one_cycle_is_not_the_others():
    engine = Engine(random_target(tiny_config()), 128)
    expected = alone(engine, [([9, 10], SamplingParams(), 12)])[0]

    class Breaks:
        def __call__(self, logits, tree):
            if int(tree.tokens[0]) != 10:  # the prompt's last token
                raise RuntimeError("a broken processor")
            return logits

        def accept(self, tokens):
            pass

    several, text = Batch(engine, 2), []
    begin(several, 0, ([9, 10], SamplingParams(), 12))
    several.begin(
        1, [9], 64, lambda own: own.generate([9, 10], SamplingParams(), 12, processor=Breaks())
    )
    errors = []
    while several.running:
        for key, new in several.step():
            if key == 0:
                text += new or []
            elif isinstance(new, Exception):
                errors.append(str(new))
    assert text == expected and errors == ["a broken processor"]


def test_what_came_before_an_error_is_not_lost():
    several, error = Batch(Engine(random_target(tiny_config()), 128), 1), RuntimeError("broken")

    def items(own):
        yield [5]
        raise error

    several.begin(0, [9], 10, items)
    assert several.step() == [(0, [5]), (0, error)]


def test_an_answer_that_failed_changes_no_later_one():
    """Its traceback holds the cycles, which end with it and not when it is dropped."""
    engine = Engine(random_target(tiny_config()), 128)
    job = [9, 10], SamplingParams(), 12
    expected = alone(engine, [job])[0]

    class Breaks:
        def __call__(self, logits, tree):
            return logits

        def accept(self, tokens):
            if len(held) == 2:
                raise RuntimeError("a broken processor")
            held.append(tokens)

    several, held, text = Batch(engine, 2), [], []
    several.begin(0, [9], 64, lambda own: own.generate(*job, processor=Breaks()))
    while several.running:
        held += [new for _, new in several.step() if isinstance(new, Exception)]
    begin(several, 1, job)
    while several.running:
        for _, new in several.step():
            text += new or []
        if len(text) > 3:
            held.clear()
            gc.collect()
    assert text == expected


def test_a_pass_that_failed_after_an_answer_was_given_up_is_not_the_next_ones():
    engine = Engine(random_target(tiny_config()), 128)
    job = [9, 10], SamplingParams(), 12
    expected = alone(engine, [job])[0]
    several = Batch(engine, 1)
    begin(several, 0, job)
    several.step()
    engine.runner.fail(RuntimeError("a broken pass"))
    several.end(0)
    begin(several, 1, job)
    assert finished(several) == {1: expected}


def test_logits_that_are_not_finite():
    target = random_target(tiny_config())
    target.lm_head.weight.fill_(float("nan"))
    several = Batch(Engine(target, 64), 2)
    begin(several, 0, ([9, 10, 11], SamplingParams(), 5))
    ((_, error),) = several.step()
    assert "not finite in float32 at position 3" in str(error)
    assert isinstance(error, EngineError) and not several.running


def test_where_memory_is_short_the_largest_idle_engine_gives_its_own_back(monkeypatch):
    """Others keep what they have computed."""
    target = random_target(tiny_config())
    target.init_rope(1024, "cpu")
    several = Batch(Engine(target, 1024), 3)
    for key, n in enumerate((300, 700, 9)):
        begin(several, key, ([9 + key] * n, SamplingParams(), 5))
    finished(several)
    small, large, engine = several.engines
    monkeypatch.setattr(batch, "available_bytes", lambda device: 9999 * (not large.cached))
    several._make_room(engine, engine.cache.n_slots + 1)
    assert small.cached and not large.cached
