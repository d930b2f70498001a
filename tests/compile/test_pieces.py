"""Compiled code that engines of one model share, and the eager backend that runs it."""

from __future__ import annotations

from fasteagle.decoding.backend import Backend
from fasteagle.decoding.cycle import EAGER
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.generate import Engine
from fasteagle.model import Target
from fasteagle.sampling import SamplingMode
from helpers import raising, random_head, spec_of


def code():
    """Stand for compiled code."""


def test_compiled_pieces_are_those_of_all_siblings_until_none_drafts_so(target):
    engine, drafters = Engine(target, 64), [NgramDrafter(), NgramDrafter()]
    sibling, plain = engine.sibling(), engine.spec(None, SamplingMode())
    spec, pieces = spec_of(drafters[0].shape), EAGER._replace(verify=code)
    keys = [(None, plain), *((drafter, spec) for drafter in drafters)]
    engine.use(drafters[0])
    engine.runner.use_compiled(dict.fromkeys(keys[:2], pieces))
    sibling.use(drafters[0].sibling())
    assert sibling.runner.pieces(spec, sibling.drafter).verify is code
    engine.use(drafters[1])
    assert [*engine.runner.compiled] == keys[:2]
    sibling.use(drafters[1].sibling())
    assert [*engine.runner.compiled] == keys[:1]


def test_advice_that_fails_hides_no_lack_of_memory(target):
    assert Backend(Target(target), raising(ValueError())).advised(None) is None


def test_a_compiled_draft_head_is_run_until_it_is_dropped(target):
    backend, head = Backend(Target(target)), random_head(target)
    assert backend.step(head) is None
    backend.use_compiled_blocks(None, {head: code})
    assert backend.step(head) is not None and backend.name == "eager"
    for name, after in (("eager", "compiled"), ("cuda", "cuda")):
        backend.name = name
        backend.use_compiled_blocks(code, {})
        assert backend.name == after
    backend.drop_compiled([head, random_head(target)])
    assert backend.step(head) is None
