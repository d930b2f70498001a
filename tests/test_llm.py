"""The Python API: answers, streams, several at once, and nothing heavy before `load`."""

from __future__ import annotations

import gc
import weakref

import pytest

import fasteagle
from fasteagle import FasteagleError
from fasteagle.answering.answer_logits import AnswerLogits
from fasteagle.answering.keywords import read_keywords
from fasteagle.compile.costs import USUAL, store_costs
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.options import GrammarSpec
from helpers import TINY_VOCAB, output_of, raising


def test_importing_it_loads_no_torch():
    code = (
        "import sys, fasteagle\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'fastapi'} & set(sys.modules)))\n"
        "print(fasteagle.__version__, callable(fasteagle.load), 'torch' in sys.modules)"
    )
    assert output_of(code) == f"[]\n{fasteagle.__version__} True True\n"


@pytest.mark.parametrize("speculate", [False, True])
def test_an_end_of_text_is_no_text(llm, monkeypatch, speculate):
    """Guessed or not, and where the tokenizer does not know it as a special token."""
    whole = llm.chat("hello", max_new_tokens=20).tokens
    new = (i for i in range(5, 20) if whole[i] not in whole[:i])
    at = next(i for i in new if llm.tokenizer.decode([whole[i]]).isalnum())
    before = llm.engine.drafter
    monkeypatch.setattr(llm.tokenizer, "eos_ids", frozenset((whole[at],)))
    llm.engine.use(NgramDrafter(lookup=Lookup(corpus=Corpus([whole], "cpu"))))
    try:
        answer = llm.chat("hello", max_new_tokens=20, speculate=speculate)
    finally:
        llm.engine.use(before)
    assert answer.tokens == whole[: at + 1] and answer.finish == "eos"
    assert answer.text == llm.tokenizer.decode(whole[:at])
    assert bool(answer.stats.accepted) == speculate


def test_an_answer_without_such_options_has_no_processor(llm, monkeypatch):
    """Cycles whose logits are changed are not timed, nor run several at a time."""
    monkeypatch.setattr(AnswerLogits, "__call__", raising(AssertionError))
    assert llm.chat("hello", max_new_tokens=5).tokens


def test_names_it_does_not_have():
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        fasteagle.lode  # noqa: B018


def test_an_answer_and_its_numbers(llm):
    assert isinstance(llm.engine.drafter, NgramDrafter)
    answer = llm.chat("hello", max_new_tokens=30)
    assert answer.stats.new_tokens == len(answer.tokens) <= 30
    assert answer.finish in ("eos", "length")
    shown = [t for t in answer.tokens if t not in llm.tokenizer.eos_ids]
    assert answer.text == str(answer) == llm.tokenizer.decode(shown)
    as_messages = llm.chat([{"role": "user", "content": "hello"}], max_new_tokens=30)
    assert as_messages.tokens == answer.tokens


def test_a_stream_is_the_answer_in_pieces(llm, monkeypatch):
    whole = llm.generate("a b a b", max_new_tokens=60)
    chunks = list(llm.generate("a b a b", stream=True, max_new_tokens=60))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [t for chunk in chunks for t in chunk.tokens] == whole.tokens
    assert sum(chunk.accepted for chunk in chunks) == llm.engine.stats.accepted > 0
    for chunk in chunks:
        assert 0 <= chunk.accepted <= len(chunk.tokens)
        assert 0 <= chunk.n_guessed <= len(chunk.text)
    monkeypatch.setattr(llm.tokenizer, "decode", lambda ids: "ab" * len(ids))
    for chunk in llm.generate("a b a b", stream=True, max_new_tokens=60):
        assert chunk.n_guessed == 2 * chunk.accepted


def test_text_and_ids_without_the_template(llm):
    ids = llm.tokenizer.encode("abc")
    assert (
        llm.generate("abc", max_new_tokens=5).tokens == llm.generate(ids, max_new_tokens=5).tokens
    )
    assert llm.engine.stats.prompt_tokens == 3


def test_plain_and_speculative_say_the_same(llm):
    fast = llm.generate("a b a b", max_new_tokens=40)
    assert fast.stats.drafted > 0
    plain = llm.generate("a b a b", max_new_tokens=40, speculate=False)
    assert plain.tokens == fast.tokens and plain.stats.drafted == 0


def test_a_conversation_keeps_the_tokens_that_were_generated(llm):
    """Random bytes would be encoded otherwise; the cache has all but the answer's last token."""
    messages = [{"role": "user", "content": "hello"}]
    first = llm.chat(messages, max_new_tokens=9, temperature=1.0, seed=3)
    text = llm.tokenizer.decode(first.tokens)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    assert llm.tokenizer.encode(text) != first.tokens
    again = llm.chat(messages, max_new_tokens=2)
    assert again.stats.cached_tokens == first.stats.prompt_tokens + len(first.tokens) - 1


@pytest.mark.parametrize(
    ("form", "spec"),
    [(True, GrammarSpec("json_object")), (False, None), ({}, GrammarSpec("json_schema", "{}"))],
)
def test_a_schema_is_a_dictionary_or_true_for_any_object(form, spec):
    assert read_keywords("chat", {"json_schema": form})["spec"] == spec


def test_a_seed_is_drawn_and_told(llm):
    first = llm.chat("hello", temperature=1.0, max_new_tokens=20)
    again = llm.chat("hello", temperature=1.0, max_new_tokens=20, seed=first.seed)
    assert again.tokens == first.tokens
    assert llm.chat("hello", temperature=1.0, max_new_tokens=2).seed != first.seed
    assert llm.chat("hello", temperature=1.0, max_new_tokens=2, seed=0).seed == 0


def test_stop_strings(llm):
    free = llm.chat("hello", max_new_tokens=20).text
    stopped = llm.chat("hello", max_new_tokens=20, stop=free[2:4])
    assert stopped.text == free[: free.index(free[2:4])] and stopped.finish == "stop"


@pytest.mark.parametrize("stop", ["qqqqq", "q" * 12, ["qqqqqqq", "qqqqqqqqqq"]], ids=str)
@pytest.mark.parametrize("top", [None, 2])
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(llm, stop, top):
    """Whatever a pass brings after it: as plain decoding would, in the cache as well."""
    letter = llm.tokenizer.encode("q")[0]  # biased by 100 it is always drawn, and guessed
    options = {"max_new_tokens": 40, "stop": stop, "logit_bias": {letter: 100}}
    options |= {} if top is None else {"top_logprobs": top}
    results = {}
    for speculate in (False, True):
        answer = llm.chat("q q qqq", speculate=speculate, **options)
        cached = list(llm.engine.cached)
        logprobs = [entry.token for entry in answer.logprobs]
        n = answer.stats.new_tokens
        results[speculate] = (answer.text, answer.tokens, answer.finish, logprobs, n, cached)
    assert answer.stats.accepted > 0
    assert results[True] == results[False]
    assert results[True][2] == "stop" and results[True][4] == len(answer.tokens)


def test_of_two_stop_strings_the_one_that_is_complete_first_counts(llm):
    letter = llm.tokenizer.encode("q")[0]
    for stop in (["q" * 9, "q" * 20], ["q" * 20, "q" * 9]):
        answer = llm.chat("q q qqq", max_new_tokens=40, stop=stop, logit_bias={letter: 100})
        assert (answer.text, len(answer.tokens)) == ("", 9)


def test_logprobs_are_those_of_the_model(llm):
    """Greedy tokens are the likeliest ones; all together, the distribution adds up to one."""
    answer = llm.chat("hello", max_new_tokens=12, top_logprobs=TINY_VOCAB)
    assert [entry.token for entry in answer.logprobs] == answer.tokens
    for entry in answer.logprobs:
        assert entry.top[0] == (entry.token, entry.logprob)
        assert sum(2.718281828**p for _, p in entry.top) == pytest.approx(1, abs=1e-4)
    alone = llm.chat("hello", max_new_tokens=12, top_logprobs=0, speculate=False).logprobs
    assert [entry.top for entry in alone] == [()] * len(answer.tokens)
    for a, b in zip(alone, answer.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_logit_bias_with_and_without_speculation(llm):
    free = llm.chat("hello", max_new_tokens=10).tokens
    wanted = next(t for t in range(97, 120) if t not in free)
    forced = llm.chat("hello", max_new_tokens=6, logit_bias={wanted: 1000})
    assert forced.tokens == [wanted] * 6
    for bias in ({free[0]: -100.0}, {free[0]: -1.0, free[1]: 1.5}):
        fast = llm.chat("hello", max_new_tokens=30, logit_bias=bias)
        plain = llm.chat("hello", max_new_tokens=30, logit_bias=bias, speculate=False)
        assert fast.tokens == plain.tokens
    banned = llm.chat("hello", max_new_tokens=30, logit_bias={free[0]: -1000.0})
    assert free[0] not in banned.tokens


@pytest.mark.parametrize("method", ["chat", "generate", "chat_batch", "generate_batch"])
def test_an_unknown_keyword_is_a_type_error(llm, method):
    prompt = ["hello"] if "batch" in method else "hello"
    call = getattr(llm, method)
    reason = r"got an unexpected keyword argument 'temprature'; did you mean 'temperature'\?$"
    with pytest.raises(TypeError, match=rf"^{method}\(\) {reason}"):
        call(prompt, temprature=1)


def test_a_flag_with_a_slip_is_a_type_error(llm):
    with pytest.raises(TypeError, match="'strem'; did you mean 'stream'"):
        llm.chat("hello", strem=True)


def test_a_policy_decides_from_the_first_token_on(tiny_dir):
    """By usual costs until some are measured, then by these."""
    with fasteagle.load(str(tiny_dir), precision="int8") as llm:
        engine = llm.engine
        policy = engine.drafter.policy
        passes = policy.costs.passes
        assert passes[8] / passes[1] == pytest.approx(USUAL.passes[8])
        assert llm.chat("hello", max_new_tokens=20, temperature=1.0, seed=1).tokens
        assert sum(policy.used.values()) > 0
        costs = USUAL.scaled(7.0)
        store_costs(engine, engine.drafter, costs, 1.0)
    with fasteagle.load(str(tiny_dir), precision="int8") as llm:
        assert llm.engine.drafter.policy.costs == costs
    with fasteagle.load(str(tiny_dir), precision="fp32") as llm:
        assert llm.engine.drafter.policy is None, "its trees are compiled first"


@pytest.mark.slow
def test_a_compiled_model_knows_what_its_passes_cost(tiny_dir):
    with fasteagle.load(str(tiny_dir), precision="int8", compile=True) as llm:
        policy = llm.engine.drafter.policy
        assert policy is not None and policy.costs.plain > 0
        assert llm.chat("hello", max_new_tokens=5).tokens


def test_closing(tiny_dir):
    llm = fasteagle.load(str(tiny_dir), precision="fp32", drafter="none")
    model = weakref.ref(llm.engine.model)
    with llm:
        assert llm.chat("x", max_new_tokens=2).tokens
    llm.close()  # twice is no harm
    gc.collect()
    assert model() is None  # its memory is free
    with pytest.raises(FasteagleError, match="was closed"):
        llm.chat("x")
    for several in (llm.chat_batch, llm.generate_batch, llm.prompt, llm.use):
        with pytest.raises(FasteagleError, match="was closed"):
            several([])
    assert vars(llm) == {"name": llm.name, "_closed": True}


def test_closing_after_an_error_keeps_the_error(tiny_dir):
    """Streams that it left are ended; one that had not begun says why it cannot."""
    llm = fasteagle.load(str(tiny_dir), precision="fp32", drafter="none")
    with pytest.raises(KeyError, match="own"), llm:
        late = llm.generate("a", stream=True, max_new_tokens=50)
        begun = llm.generate("a", stream=True, max_new_tokens=50)
        next(begun)
        raise KeyError("own")
    assert not hasattr(llm, "engine")
    with pytest.raises(FasteagleError, match="was interrupted"):
        list(begun)
    with pytest.raises(FasteagleError, match="this model was closed"):
        list(late)
    with pytest.raises(KeyError, match="again"), llm:
        raise KeyError("again")


def test_leaving_and_another_drafter_are_refused_while_an_answer_is_under_way(tiny_dir):
    """Kernels raised in the middle of an answer whose drafter had changed."""
    llm = fasteagle.load(str(tiny_dir), precision="fp32", drafter="none")
    begun = llm.generate("a", stream=True, max_new_tokens=50)
    next(begun)
    for refused in (lambda: llm.use(None), lambda: llm.__exit__(None)):
        with pytest.raises(FasteagleError, match="an answer is under way"):
            refused()
    begun.close()
    llm.use(None)
    llm.close()
