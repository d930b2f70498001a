"""Values that the Python API cannot take: one line that names the argument."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import fasteagle
from fasteagle.errors import FasteagleError, shown

# What `fasteagle.load` and its answers take, and the line.
LOADED = [
    ({"model": 3}, "model 3 is no name"),
    ({"model": ""}, "model '' is no name"),
    ({"model": None}, "model None is no name and no path"),
    ({"head": 3}, "head 3 is no name and no path"),
    ({"head": Path("none")}, "head 'none': no such folder"),
    ({"head": "x", "drafter": "ngram"}, "head has no meaning with drafter 'ngram'"),
    ({"tree": None}, "tree None is no name and no path"),
    ({"tree": ""}, "tree '' is empty: give auto or a file"),
    ({"precision": None}, "precision None is no text"),
    ({"precision": "int3"}, "3 bits have no kernel"),
    ({"device": "cpu:7"}, "device 'cpu:7' is not supported"),
    ({"threads": "2"}, "threads '2' is not a whole number"),
    ({"max_seq_len": 2.5}, "max-seq-len 2.5 is not a whole number"),
    ({"precision": "int" + "9" * 5000}, "quantization 'int999"),
    ({"prefix_cache_gb": 1e300}, "prefix-cache 1e+300 is out of range"),
    ({"prefix_cache_gb": -1}, "prefix-cache -1 is out of range"),
    ({"prefix_cache_gb": "1"}, "prefix-cache '1' is not a number"),
    ({"compile": "no"}, "compile 'no' is neither True nor False"),
    ({"notify": None}, "notify None is no function"),
    ({"drafter": "model"}, "drafter 'model' is for the command line: its --draft-model"),
]
REQUESTS = [
    ("x", {"stream": "no"}, "stream 'no' is neither True nor False"),
    ("x", {"speculate": "off"}, "speculate 'off' is neither True nor False"),
    ("x", {"speculate": None}, "speculate None is neither True nor False"),
    ("x", {"stream": None}, "stream None is neither True nor False"),
    ({"messages": "x"}, {"think": "off"}, "think 'off' is neither True nor False"),
    ("x", {"temperature": "hot"}, "temperature 'hot' is not a number"),
    ("x", {"top_k": 2.5}, "top-k 2.5 is not a whole number"),
    ("x", {"seed": True}, "seed True is not a whole number"),
    ("x", {"seed": 2**63}, "seed 9223372036854775808 is out of range"),
    ("x", {"seed": -(10**5000)}, "seed of thousands of digits is out of range"),
    ([10**5000], {}, "token id of thousands of digits is outside the vocabulary"),
    ("x", {"max_new_tokens": "5"}, "max-new-tokens '5' is not a whole number"),
    ("x", {"max_new_tokens": 2.5}, "max-new-tokens 2.5 is not a whole number"),
    ("x", {"max_new_tokens": 0}, "max-new-tokens 0 is out of range"),
    ("x", {"temperature": -1}, "temperature -1 is out of range"),
    ("x", {"temperature": 1e-7}, "temperature 1e-07 is out of range: use 0 (greedy) or >= 1e-05"),
    (
        "x",
        {"logit_bias": {260: 1.0}},
        "logit_bias: token id 260 is outside the vocabulary of 260: use 0 .. 259",
    ),
    ("x", {"top_logprobs": -1}, "top_logprobs -1 is out of range"),
    ("x", {"presence_penalty": "hot"}, "presence_penalty 'hot' is out of range"),
    ("x", {"frequency_penalty": 2.1}, "frequency_penalty 2.1 is out of range: use -2 .. 2"),
    ("x", {"logit_bias": dict.fromkeys(range(260), -math.inf)}, "logit_bias forbids every token"),
    ("x", {"logit_bias": {5.5: 1}}, "logit_bias: 5.5 is no token id"),
    ("x", {"logit_bias": {"5": 1}}, "logit_bias: '5' is no token id"),
    ("x", {"logit_bias": {5: "1"}}, "logit_bias '1' of token id 5 is out of range"),
    ("x", {"logit_bias": {5: math.nan}}, "logit_bias nan of token id 5 is out of range"),
    ("x", {"logit_bias": {5: math.inf}}, "logit_bias inf of token id 5 is out of range"),
    ("x", {"logit_bias": {5: 1e300}}, "logit_bias 1e+300 of token id 5 is out of range"),
    ("x", {"logit_bias": [5]}, "logit_bias [5] is no dictionary"),
    ("x", {"top_logprobs": 2.5}, "top_logprobs 2.5 is not a whole number"),
    ("x", {"top_logprobs": True}, "top_logprobs True is not a whole number"),
    ("x", {"top_logprobs": "3"}, "top_logprobs '3' is not a whole number"),
    ("x", {"presence_penalty": True}, "presence_penalty True is out of range"),
    ("x", {"regex": 5}, "regex 5 is no text"),
    ("x", {"json_schema": {"enum": {1}}}, "json_schema is not JSON: "),
    ("x", {"regex": "a", "grammar": "b"}, "regex and grammar contradict each other"),
    ("x", {"stop": [""]}, "a stop string is empty"),
    ("x", {"stop": 3}, "stop 3 is no text and no list of texts"),
    ("x", {"stop": [3]}, "stop [3] is no text and no list of texts"),
    ("\ud800", {}, "prompt holds '\\ud800', half of a character"),
    (b"x", {}, "prompt b'x' is no text and no list of token ids"),
    ([1.5], {}, "prompt [1.5] is no text and no list of token ids"),
    ([True, False], {}, "prompt [True, False] is no text and no list of token ids"),
    (3, {}, "prompt 3 is no text and no list of token ids"),
    ([], {}, "the prompt is empty"),
    ({"messages": []}, {}, "messages is empty"),
    ({"messages": 3}, {}, "messages 3 is no text and no list of messages"),
    ({"messages": "x"}, {"think": True}, "think on: this model's chat template has no thinking"),
    ({"messages": ["x"]}, {}, "messages: 'x' is no dictionary of role and content"),
    ({"messages": [{"role": "x"}]}, {}, "messages: {'role': 'x'} is no dictionary of role and"),
    ({"messages": [{"role": "user", "content": 3}]}, {}, "content 3 is no text"),
    ({"messages": [{"role": 5, "content": "x"}]}, {}, "role 5 is no text"),
    ({"messages": [{"role": None, "content": "x"}]}, {}, "role None is no text"),
    ({"messages": [{"role": ["a"], "content": "x"}]}, {}, "role ['a'] is no text"),
    ({"messages": [{"role": "\ud800", "content": "x"}]}, {}, "role holds '\\ud800', half of"),
    ({"messages": "\udc00"}, {}, "content holds '\\udc00', half of a character"),
]


@pytest.mark.parametrize(("keywords", "message"), LOADED, ids=str)
def test_loading_from_python_names_the_argument(tiny_dir, keywords, message):
    with pytest.raises(FasteagleError) as caught:
        fasteagle.load(**{"model": tiny_dir, **keywords})
    assert message in str(caught.value)


@pytest.mark.parametrize(("prompt", "keywords", "message"), REQUESTS, ids=shown)
def test_asking_from_python_names_the_argument(llm, prompt, keywords, message):
    with pytest.raises(FasteagleError) as caught:
        if isinstance(prompt, dict):
            llm.chat(prompt["messages"], **keywords)
        else:
            llm.generate(prompt, **keywords)
    assert str(caught.value).startswith(message)


def test_what_yields_ids_or_messages_is_read_once(llm):
    ids, messages = [5, 6, 7], [{"role": "user", "content": "hi"}]
    few = {"max_new_tokens": 4}
    assert llm.generate(iter(ids), **few).tokens == llm.generate(ids, **few).tokens
    assert llm.chat(iter(messages), **few).tokens == llm.chat(messages, **few).tokens


def test_a_bias_of_minus_infinity_forbids_a_token(llm):
    first = llm.generate("x", max_new_tokens=1).tokens[0]
    other = llm.generate("x", max_new_tokens=1, logit_bias={first: -math.inf})
    assert other.tokens != [first]
