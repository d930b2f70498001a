"""The Python API: answers, streams, several at once, and nothing heavy before `load`."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
import weakref

import pytest

import fasteagle
from fasteagle import FasteagleError
from fasteagle.batch import Batch, NoRoomError
from fasteagle.compile.costs import USUAL, store_costs
from fasteagle.decoding import context
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.runner import Runner
from fasteagle.decoding.stats import Stats
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.generate import Engine
from fasteagle.options import AnswerOptions, SamplingParams
from helpers import TINY_VOCAB, output_of


@pytest.fixture(scope="module")
def llm(tiny_dir):
    with fasteagle.load(str(tiny_dir), precision="fp32", drafter="ngram") as made:
        yield made


def test_importing_it_loads_no_torch():
    code = (
        "import sys, fasteagle\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'fastapi'} & set(sys.modules)))\n"
        "print(fasteagle.__version__, callable(fasteagle.load), 'torch' in sys.modules)"
    )
    assert output_of(code) == f"[]\n{fasteagle.__version__} True True\n"


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


def test_a_stream_is_the_answer_in_pieces(llm):
    whole = llm.generate("a b a b", max_new_tokens=60)
    chunks = list(llm.generate("a b a b", stream=True, max_new_tokens=60))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [t for chunk in chunks for t in chunk.tokens] == whole.tokens
    assert sum(chunk.accepted for chunk in chunks) == llm.engine.stats.accepted > 0
    for chunk in chunks:
        assert 0 <= chunk.accepted <= len(chunk.tokens)
        assert 0 <= chunk.n_guessed <= len(chunk.text)


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


def test_a_seed_is_drawn_and_told(llm):
    first = llm.chat("hello", temperature=1.0, max_new_tokens=20)
    again = llm.chat("hello", temperature=1.0, max_new_tokens=20, seed=first.seed)
    assert again.tokens == first.tokens
    assert llm.chat("hello", temperature=1.0, max_new_tokens=2).seed != first.seed


def test_stop_strings(llm):
    free = llm.chat("hello", max_new_tokens=20).text
    stopped = llm.chat("hello", max_new_tokens=20, stop=free[2:4])
    assert stopped.text == free[: free.index(free[2:4])] and stopped.finish == "stop"


@pytest.mark.parametrize("stop", ["qqqqq", "q" * 12, ["qqqqqqq", "qqqqqqqqqq"]], ids=str)
@pytest.mark.parametrize("top", [None, 2])
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(llm, stop, top):
    """Whatever a pass brings behind it: as plain decoding would, in the cache as well."""
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
    stop = ["q" * 9, "q" * 20]
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


def test_an_unknown_keyword_is_a_type_error(llm):
    with pytest.raises(TypeError, match="temprature"):
        llm.chat("hello", temprature=1)


def test_streams_in_any_order(llm):
    questions = ["hello", "a b a b", "Why?", "one two one two"]
    alone = [llm.chat(question, max_new_tokens=90).tokens for question in questions]
    streams = [llm.chat(question, stream=True, max_new_tokens=90) for question in questions]
    tokens = [[] for _ in questions]
    choose = random.Random(1)
    left = list(range(len(streams)))
    tokens[2] += next(streams[2]).tokens
    tokens[3] = [token for chunk in streams[3] for token in chunk.tokens]
    left.remove(3)
    while left:
        i = choose.choice(left)
        chunk = next(streams[i], None)
        if chunk is None:
            left.remove(i)
        else:
            tokens[i] += chunk.tokens
    assert tokens == alone
    assert not llm.answers.running


def test_an_answer_does_not_wait_for_the_reader_of_its_stream(llm):
    expected = llm.chat("hello", max_new_tokens=90, speculate=False).tokens
    stream = llm.chat("hello", stream=True, max_new_tokens=90, speculate=False)
    first = next(stream)
    llm.chat("a b", max_new_tokens=99, speculate=False, logit_bias={100: 1000.0})
    assert not llm.answers.running
    assert [*first.tokens, *(t for chunk in stream for t in chunk.tokens)] == expected


def test_an_answer_beside_an_open_stream(llm):
    expected = llm.chat("hello", max_new_tokens=30).tokens
    stream = llm.chat("a b", stream=True, max_new_tokens=50)
    next(stream)
    tokens = []
    thread = threading.Thread(
        target=lambda: tokens.extend(llm.chat("hello", max_new_tokens=30).tokens)
    )
    thread.start()
    thread.join()
    assert tokens == expected
    more = [llm.chat("a b", stream=True, max_new_tokens=50) for _ in range(8)]
    for one in more[1:]:
        next(one)
    with pytest.raises(FasteagleError, match="8 answers are under way, .* close it first"):
        next(more[0])
    for one in (stream, *more):
        one.close()
    assert llm.chat("hello", max_new_tokens=30).tokens == expected


def test_another_stream_is_read_while_a_long_prompt_is_computed(llm, monkeypatch):
    """Chunks that are there need no turn, and a turn is one pass."""
    monkeypatch.setattr(context, "PREFILL_CHUNK", 8)
    step, read, stepping, then = Batch.step, [], threading.Event(), []
    other = llm.generate([5, 6, 7], stream=True, max_new_tokens=60)
    long = llm.generate(list(range(8, 50)) * 4, stream=True, max_new_tokens=1)
    next(other)

    def slow(own):
        stepping.set()
        time.sleep(0.02)
        return step(own)

    def answer_long():
        next(long)
        then.append(len(read))

    monkeypatch.setattr(Batch, "step", slow)
    readers = answer_long, lambda: [read.append(chunk) for chunk in other]
    threads = [threading.Thread(target=reader) for reader in readers]
    threads[0].start()
    assert stepping.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    long.close()
    assert then[0] > 5


def test_the_garbage_collector_closes_a_stream_within_a_pass(llm, monkeypatch):
    expected = llm.chat("hello", max_new_tokens=30).tokens
    abandoned = [llm.chat("a b", stream=True, max_new_tokens=90)]
    next(abandoned[0])
    verify = Backend.verify_together

    def collecting(*arguments):
        abandoned.clear()  # nothing else refers to it
        return verify(*arguments)

    monkeypatch.setattr(Backend, "verify_together", collecting)
    tokens = []
    thread = threading.Thread(
        target=lambda: tokens.extend(llm.chat("hello", max_new_tokens=30).tokens), daemon=True
    )
    thread.start()
    thread.join(20)
    assert tokens == expected and not thread.is_alive() and not llm.answers.running


@pytest.mark.parametrize(
    ("owner", "name"), [(Backend, "verify_together"), (Runner, "finish"), (Engine, "_record")]
)
def test_an_interruption_ends_the_answers_under_way(llm, monkeypatch, owner, name):
    """None goes on without what it had in the interrupted pass."""
    expected = llm.chat("hello", max_new_tokens=30).tokens
    streams = [llm.chat("hello", stream=True, max_new_tokens=30) for _ in range(2)]
    tokens = list(next(streams[1]).tokens)
    next(streams[0])
    usual, calls = getattr(owner, name), []

    def interrupt(*arguments):
        calls.append(arguments)
        if len(calls) == 2 or owner is Backend:
            raise KeyboardInterrupt
        return usual(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(streams[0])
    with pytest.raises(FasteagleError, match="interrupted"):
        for chunk in streams[1]:
            tokens += chunk.tokens
    assert tokens == expected[: len(tokens)]
    assert not llm.answers.running
    assert llm.chat("hello", max_new_tokens=30).tokens == expected


def test_a_common_beginning_is_computed_once(llm):
    text = "a b c d e f g h " * 8
    alone = [llm.generate(text + end, max_new_tokens=12).tokens for end in ("x", "y", "z")]
    for engine in llm.answers._batch.engines:
        engine.restart()
    several = llm.generate_batch([text + end for end in ("x", "y", "z")], max_new_tokens=12)
    assert [one.tokens for one in several] == alone
    cached = [one.stats.cached_tokens for one in several]
    assert cached[0] == 0 and min(cached[1:]) > 100


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}, {"stop": ["e"]}], ids=str)
def test_several_answers_are_those_of_one_after_the_other(llm, options):
    questions = ["hello", "a b a b", "Why?", "a b a b"]
    options = options | {"max_new_tokens": 20}
    single = [llm.chat(question, **options) for question in questions]
    several = llm.chat_batch(questions, size=3, **options)
    assert [(a.text, a.tokens, a.finish) for a in several] == [
        (a.text, a.tokens, a.finish) for a in single
    ]
    assert several[1].stats.new_tokens == len(several[1].tokens)
    ids = llm.generate_batch(["a b", [5, 6, 7]], top_logprobs=0, **options)
    assert ids[1].tokens == llm.generate([5, 6, 7], **options).tokens
    assert len(ids[1].logprobs) == len(ids[1].tokens)
    assert llm.chat_batch([]) == []


def test_the_first_token_is_timed_from_the_beginning(llm):
    params, options = SamplingParams(), AnswerOptions(3)
    stats = [Stats() for _ in range(2)]
    for key in range(2):
        llm.answers.begin(key, llm.made_request([5, 6], params, options), stats=stats[key])
    time.sleep(0.2)
    told = set()
    while llm.answers.running:
        llm.answers.step()
        told.add(stats[0].ttft)
    assert 0.2 < stats[0].ttft < stats[1].ttft
    assert told <= {0.0, stats[0].ttft}  # later tokens leave it as it is


def test_a_batch_takes_the_room_that_there_is(llm, monkeypatch):
    """Two of the answers fit, whatever `size` is."""
    begin, most = Batch.begin, []

    def short(batch, *arguments, **more):
        if len(batch.running) == 2:
            raise NoRoomError("too many")
        begin(batch, *arguments, **more)
        most.append(len(batch.running))

    questions = ["hello", "a b a b", "Why?", "one two"]
    alone = [llm.chat(question, max_new_tokens=20).tokens for question in questions]
    monkeypatch.setattr(Batch, "begin", short)
    assert [one.tokens for one in llm.chat_batch(questions, max_new_tokens=20)] == alone
    assert len(most) == 4 and max(most) == 2
    stream = llm.chat("hello", stream=True)
    with contextlib.closing(stream), contextlib.closing(llm.chat("Why?", stream=True)) as other:
        assert next(stream) and next(other)
        with pytest.raises(NoRoomError):
            llm.chat_batch(["hello"])


def test_a_batch_waits_with_the_rest_where_others_take_the_last_slot(llm, monkeypatch):
    """It lost all its answers if that was between its look and its turn."""
    questions = ["hello", "a b a b", "Why?"]
    alone = [llm.chat(question, max_new_tokens=20).tokens for question in questions]
    others, opening = [], llm.answers._open

    def taken(*arguments, **more):
        if len(llm.answers.running) == 1 and not others:
            others.extend(llm.chat("x", stream=True) for _ in range(llm.answers.size - 1))
            for other in others:
                next(other)
        opening(*arguments, **more)

    monkeypatch.setattr(llm.answers, "_open", taken)
    try:
        answers = llm.chat_batch(questions, size=3, max_new_tokens=20)
    finally:
        for other in others:
            other.close()
    assert [one.tokens for one in answers] == alone and len(others) == llm.answers.size - 1


def test_what_a_batch_refuses(llm):
    for size in (0, 9, 2.5, "x"):
        with pytest.raises(FasteagleError, match=f"size {size!r} is out of range: use 1 .. 8"):
            llm.chat_batch(["hello"], size=size)
    with pytest.raises(FasteagleError, match="conversations 'hello' is no list"):
        llm.chat_batch("hello")
    with pytest.raises(FasteagleError, match="messages is empty"):
        llm.chat_batch(["hello", []])
    with pytest.raises(FasteagleError, match="the prompt is empty"):
        llm.generate_batch([[5], []])


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
    for several in (llm.chat_batch, llm.generate_batch):
        with pytest.raises(FasteagleError, match="was closed"):
            several([])
    assert not hasattr(llm, "engine")


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


def test_leaving_without_an_error_refuses_while_an_answer_is_under_way(tiny_dir):
    llm = fasteagle.load(str(tiny_dir), precision="fp32", drafter="none")
    with pytest.raises(FasteagleError, match="an answer is under way"), llm:
        begun = llm.generate("a", stream=True, max_new_tokens=50)
        next(begun)
    begun.close()
    llm.close()


def test_structured_output_says_what_it_needs(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(FasteagleError, match=r"pip install 'fasteagle\[serve\]'"):
        llm.chat("x", regex="a")
