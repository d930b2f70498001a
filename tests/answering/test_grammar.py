"""Grammars and penalties: every drafter gives the text of plain decoding, which obeys them."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch

from fasteagle.answering.answer import answer
from fasteagle.answering.answer_logits import AnswerLogits, AnswerRequest
from fasteagle.answering.grammar import GrammarCompiler
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.errors import EngineError, FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.options import AnswerOptions, GrammarSpec, SamplingParams
from fasteagle.quant import cpu_build
from fasteagle.shapes import FusedShape, TreeShape
from fasteagle.tree import DraftTree
from helpers import (
    TINY_VOCAB,
    allowed,
    captured_engine,
    eagle3_of,
    fused_drafter,
    generated,
    random_head,
)

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"enum": [1, 20, 300]}, "maxItems": 3, "minItems": 2},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
SPECS = (
    GrammarSpec("json_schema", json.dumps(SCHEMA)),
    GrammarSpec("json_object"),
    GrammarSpec("regex", "(ab|ac|b[0-9]{2,4}-)+"),
    GrammarSpec("grammar", 'start: ("x" | "yz" | num)+\nnum: /[0-9]{2}/ ";"'),
)
DRAWN = (
    SamplingParams(),
    SamplingParams(1.0, seed=4),
    SamplingParams(0.8, top_k=20, repetition_penalty=1.2, seed=5),
)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, TINY_VOCAB)


def drafters(model, number):
    """Three of all, by the number of a case; those with the draft heads of both kinds."""
    made = {"ngram": NgramDrafter(depth=4)}
    for kind in ("eagle1", "eagle3"):
        head = random_head(model, eagle3=eagle3_of(kind, model.config))
        made[f"{kind} tree"] = EagleDrafter(head, TreeShape(3, 4, 12))
        made[f"{kind} chain"] = EagleDrafter(head, TreeShape(4, 1, 4))
        made[f"{kind} static"] = StaticTreeDrafter(head)
        made[f"{kind} fused"] = fused_drafter(head, FusedShape(3, 3, 8, 8))
    return dict(list(made.items())[number % 3 :: 3])


PROMPT = "<|user|>write it<|end|><|assistant|>"


def answered(engine, tokenizer, params=SamplingParams(), n=60, more=(), **changes):  # noqa: B008
    prompt = [*tokenizer.encode(PROMPT), *more]
    request = AnswerRequest(prompt, params, AnswerOptions(n), tokenizer.eos_ids, **changes)
    chunks = list(answer(engine, tokenizer, request))
    return [t for c in chunks for t in c.tokens], "".join(c.text for c in chunks)


def run(engine, tokenizer, compiler, spec, params=SamplingParams(), n=60):  # noqa: B008
    return answered(engine, tokenizer, params, n, mask=compiler.start(spec))


@pytest.mark.parametrize("number", range(4))
def test_every_drafter_gives_the_tokens_of_plain_decoding(model, tokenizer, compiler, number):
    spec, params = SPECS[number], (*DRAWN, DRAWN[1])[number]
    expected, _ = run(Engine(model, 512), tokenizer, compiler, spec, params, 40)
    unbound, _ = answered(Engine(model, 512), tokenizer, params)
    assert expected != unbound[: len(expected)]  # the grammar changes something
    drafted = 0
    for name, drafter in drafters(model, number).items():
        engine = Engine(model, 512, drafter=drafter)
        tokens, _ = run(engine, tokenizer, compiler, spec, params, 40)
        assert tokens == expected, name
        drafted += engine.stats.drafted
        assert name == "ngram" or engine.stats.drafted > 0
    assert drafted > 20


@pytest.mark.parametrize(
    ("number", "presence", "frequency"), [(0, 0.5, -2.5), (1, 0.0, 2.0), (2, -2.5, 0.5)]
)
def test_every_drafter_gives_the_tokens_of_plain_decoding_under_penalties(
    model, tokenizer, number, presence, frequency
):
    """They are also those of one-token answers with the penalties written as a bias."""
    params = DRAWN[number]
    named = {"presence_penalty": presence, "frequency_penalty": frequency}
    engine = Engine(model, 512)
    expected, _ = answered(engine, tokenizer, params, n=32, **named)
    assert expected != answered(engine, tokenizer, params, n=32)[0]
    ids = []
    while len(ids) < len(expected):
        counts = Counter(ids)
        bias = {token: -(presence + frequency * n) for token, n in counts.items()}
        ids += answered(engine, tokenizer, params, 1, ids, logit_bias=bias)[0]
    assert ids == expected
    for name, drafter in drafters(model, number).items():
        engine = Engine(model, 512, drafter=drafter)
        assert answered(engine, tokenizer, params, n=32, **named)[0] == expected, name
        assert name == "ngram" or engine.stats.drafted > 0


def test_drafted_tokens_inside_a_grammar_are_accepted(model, tokenizer, compiler):
    """Speculation stays on: where the form leaves no choice, an n-gram's guesses are right."""
    spec = GrammarSpec("regex", "(abcdefgh){8}")
    engine = Engine(model, 512, drafter=NgramDrafter(depth=4))
    _, text = run(engine, tokenizer, compiler, spec, n=64)
    assert text == 8 * "abcdefgh"
    assert engine.stats.accepted > 30 and engine.stats.tau > 2


def test_text_conforms(model, tokenizer, compiler):
    n_whole = 0
    for seed in range(4):
        params = SamplingParams(1.0, seed=seed)
        engine = Engine(model, 512, drafter=NgramDrafter(depth=4))
        _, text = run(engine, tokenizer, compiler, SPECS[0], params, n=400)
        if engine.stats.finish != "eos":  # a random model may go on with blanks
            continue
        n_whole += 1
        value = json.loads(text)
        assert set(value) == {"name", "sizes", "kind"} and value["kind"] in ("small", "large")
        assert 2 <= len(value["sizes"]) <= 3
    assert n_whole >= 2
    _, text = run(Engine(model, 512), tokenizer, compiler, GrammarSpec("regex", "[a-f]{3,5}"), n=9)
    assert re.fullmatch("[a-f]{3,5}", text)


def test_the_end_comes_when_the_form_is_complete(model, tokenizer, compiler):
    engine = Engine(model, 512)
    ids, text = run(engine, tokenizer, compiler, GrammarSpec("regex", "yes|no"))
    assert text in ("yes", "no") and engine.stats.finish == "eos"
    assert ids[-1] in tokenizer.eos_ids


def test_masks_are_made_between_two_graphs(model, tokenizer, compiler):
    """No graph can ask the host for a mask; afterwards whole cycles are replayed."""
    head = random_head(model)
    expected, _ = run(Engine(model, 512), tokenizer, compiler, SPECS[0])
    engine = captured_engine(model, 512)
    engine.use(EagleDrafter(head, TreeShape(3, 4, 12)))
    assert run(engine, tokenizer, compiler, SPECS[0])[0] == expected
    masked = engine.runner.replays
    assert masked == engine.stats.passes > 0 and engine.runner.captured == 2
    plain = generated(Engine(model, 512), 30, params=DRAWN[0])
    assert generated(engine, 30, params=DRAWN[0]) == plain
    assert engine.runner.replays > masked


def test_each_row_has_the_mask_of_its_own_path(compiler):
    """Against a grammar that is advanced along the path by itself."""
    spec = GrammarSpec("regex", "a(b|c)d|bcd")
    ids = {c: compiler.tokenizer.encode(c)[0] for c in "abcdx"}
    tree = [("x", 0), ("a", 0), ("b", 0), ("b", 1), ("c", 1), ("c", 2), ("d", 3), ("x", 0)]
    tokens, parents = [ids[c] for c, _ in tree], [p for _, p in tree]
    mask = compiler.start(spec)
    rows = allowed(mask, TINY_VOCAB, tokens, parents)
    paths = {0: "", 1: "a", 2: "b", 3: "ab", 4: "ac", 5: "bc", 6: "abd"}
    for row, path in paths.items():
        alone = compiler.start(spec)
        alone.advance([ids[c] for c in path])
        expected = allowed(alone, TINY_VOCAB)[0]
        assert torch.equal(rows[row], expected), path
    assert rows[7].all()  # the grammar does not lead there
    again = allowed(mask, TINY_VOCAB, tokens, parents)
    assert torch.equal(rows, again)  # and it stands where it stood


class Toy:
    """A vocabulary of all bytes and of a few longer tokens, as llguidance reads one."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>", b'{"', b'":', b' "')
    eos_ids = frozenset({eos_token_id})
    special_in = ChatTokenizer.special_in
    _marks = re.compile("<end>|<é>"), None

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())

    def guidance(self, vocab_size):
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))


def test_the_mask_after_another_branch():
    """llguidance 1.9 has another one after a rollback."""
    compiler, (begin, key, text) = GrammarCompiler(Toy(), 260), (257, 258, 259)
    spec = GrammarSpec("json_object")

    def alone(path):
        mask = compiler.start(spec)
        mask.advance(path)
        return allowed(mask, 260)[0]

    mask = compiler.start(spec)
    mask.advance([begin, key])
    rows = allowed(mask, 260, [0, text, begin, ord("a")], [0, 0, 0, 2])
    for row, path in enumerate(([], [text], [begin], [begin, ord("a")])):
        assert torch.equal(rows[row], alone([begin, key, *path])), path
    mask.advance([begin])
    assert torch.equal(allowed(mask, 260)[0], alone([begin, key, begin]))


def test_a_branch_in_which_the_grammar_fails_ends_only_an_answer_that_takes_it():
    """llguidance has limits that a text meets only after some beginnings."""
    rules = [f'r{i}: "a" "{i}"\n' for i in range(2001)]
    names = " | ".join(rule.split(":")[0] for rule in rules)
    spec = GrammarSpec("grammar", f'start: "xy" | "y" ({names})\n{"".join(rules)}')
    for token in b"xy":
        mask = GrammarCompiler(Toy(), 260).start(spec)
        rows = allowed(mask, 260, [0, *b"xy"], [0, 0, 0])
        assert rows[:2].sum(1).tolist() == [2, 1]
        if token == ord("x"):
            mask.advance([token])
            continue
        with pytest.raises(FasteagleError, match="it failed: .* has 2002 items; max is 2000"):
            mask.advance([token, ord("a")])


def test_an_end_comes_only_where_the_form_is_complete():
    """Where a form demands the text of the token, too: that is no end."""
    compiler = GrammarCompiler(Toy(), 260)
    mask = compiler.start(GrammarSpec("grammar", 'start: "a<end>b" | "c"'))
    assert not allowed(mask, 260)[0, 256]
    mask.advance([ord("c")])
    assert allowed(mask, 260)[0, 256]


@pytest.mark.parametrize("n_rows", [1, 3])
def test_a_form_without_any_next_token_is_an_error(n_rows):
    """Also where a tree has other rows, whose masks nobody needs; `c` is not among 64 tokens."""
    mask = GrammarCompiler(Toy(), 260).start(GrammarSpec("regex", "c"))
    with pytest.raises(EngineError, match="no token may come next"):
        allowed(mask, 64, [0] * n_rows, [0] * n_rows)


@pytest.mark.parametrize(
    "spec",
    [
        ("regex", r"a\<end\>b"),
        ("json_schema", '{"const": "a<end>"}'),
        ("json_schema", '{"enum": ["\\u003cend\\u003e"]}'),
        ("json_schema", '{"const": "<\\u00e9>"}'),
    ],
)
def test_forms_of_special_tokens_are_refused(spec):
    with pytest.raises(FasteagleError, match="'<(end|é)>' is a special token of this model"):
        GrammarCompiler(Toy(), 260).start(GrammarSpec(*spec))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("regex", "(?=a)b"), "regex: .*look-around"),
        (("regex", "a("), "regex: "),
        (("grammar", "start: nothing"), "grammar: "),
        (("json_schema", '{"type": "nonsense"}'), "json_schema: "),
        (("json_schema", "{"), "json_schema is not JSON"),
        (("json_schema", "3"), "must be a JSON object"),
        (("json_schema", '{"const": NaN}'), "json_schema is not JSON"),
        (("json_schema", '{"const": 1e999}'), "json_schema is not JSON"),
        (("regex", ""), "regex is empty"),
        (("xml", "a"), "kind 'xml' is unknown"),
    ],
)
def test_forms_that_are_refused(compiler, spec, message):
    with pytest.raises(FasteagleError, match=message):
        compiler.start(GrammarSpec(*spec))


def test_kernels_forbid_what_torch_forbids(compiler, monkeypatch):
    cpu_build.load()
    rows = {}
    for loaded in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(cpu_build, "serves", lambda x, loaded=loaded: loaded)
            rows[loaded] = allowed(compiler.start(SPECS[0]), TINY_VOCAB)
    assert torch.equal(rows[False], rows[True]) and rows[True].any() and not rows[True].all()


def processor_of(**options):
    return AnswerLogits(
        AnswerRequest([1], SamplingParams(), AnswerOptions(), frozenset(), **options)
    )


def test_logprobs_are_those_before_the_grammar(compiler):
    """Though its mask changes the logits that tokens are drawn from, in place."""
    cpu_build.load()
    logits = torch.randn(1, TINY_VOCAB)
    before = logits.clone()
    processor = processor_of(mask=compiler.start(SPECS[0]), top_logprobs=0)
    tree = DraftTree(torch.zeros(1).long(), torch.zeros(1).long(), torch.ones(1).bool())
    masked = processor(logits, tree)
    token = int(masked.argmax())
    processor.accept([token])
    (entry,) = processor.logprobs
    assert entry.logprob == pytest.approx(float(before[0].log_softmax(-1)[token]))
    assert not masked.isfinite().all()


def test_log_probabilities_are_those_of_the_accepted_rows():
    """Padding is token 0 below the root, as a token of the text may be."""
    processor, logits = processor_of(top_logprobs=0), torch.randn(4, 12)
    tokens, parents = torch.tensor([4, 0, 0, 5]), torch.tensor([0, 0, 0, 2])
    processor(logits, DraftTree(tokens, parents, torch.tensor([True, False, True, True])))
    processor.accept([0, 5, 8])
    rows = logits.log_softmax(-1).tolist()
    expected = [rows[0][0], rows[2][5], rows[3][8]]
    assert [entry.logprob for entry in processor.logprobs] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("penalties", [(1.5, 0.0), (0.0, 0.4), (1.5, 0.4)])
def test_penalties_count_the_tokens_of_each_path(penalties):
    processor = processor_of(presence_penalty=penalties[0], frequency_penalty=penalties[1])
    processor.accept([3, 5, 3])
    tokens, parents = torch.tensor([3, 7, 3, 9]), torch.tensor([0, 0, 0, 2])
    logits = torch.randn(4, 12)
    out = processor(logits.clone(), DraftTree(tokens, parents, torch.ones(4).bool()))
    for row, path in enumerate(([], [7], [3], [3, 9])):
        counts = Counter([3, 5, 3, *path])
        for token in range(12):
            n = counts[token]
            expected = logits[row, token] - penalties[1] * n - penalties[0] * (n > 0)
            assert out[row, token] == pytest.approx(float(expected), abs=1e-6)


def test_bias_of_forbidden_tokens_opens_nothing(model, tokenizer, compiler):
    z = tokenizer.encode("z")[0]
    usual = tokenizer.encode("abc"), SamplingParams(), AnswerOptions(12), tokenizer.eos_ids
    mask = compiler.start(GrammarSpec("regex", "[ab]{6}"))
    request = AnswerRequest(*usual, logit_bias={z: 1000.0}, mask=mask, top_logprobs=1)
    chunks = list(answer(Engine(model, 512, drafter=NgramDrafter()), tokenizer, request))
    assert re.fullmatch("[ab]{6}", "".join(c.text for c in chunks))
    assert sum(len(c.logprobs) for c in chunks) == sum(len(c.tokens) for c in chunks)
