"""Values that the Python API cannot take: one line that names the argument."""

from __future__ import annotations

import pytest

import fasteagle
from fasteagle.errors import FasteagleError

# What `fasteagle.load` and its answers take, and the line.
LOADED = [
    ({"model": 3}, "model 3 is no name"),
    ({"model": ""}, "model '' is no name"),
    ({"precision": "int3"}, "3 bits have no kernel"),
    ({"device": "cpu:7"}, "device 'cpu:7' is not supported"),
    ({"threads": "2"}, "threads '2' is not a whole number"),
    ({"max_seq_len": 2.5}, "max-seq-len 2.5 is not a whole number"),
    ({"prefix_cache_gb": -1}, "prefix-cache -1 is out of range"),
    ({"prefix_cache_gb": "1"}, "prefix-cache '1' is not a number"),
]
ASKED = [
    ("x", {"temperature": "hot"}, "temperature 'hot' is not a number"),
    ("x", {"top_k": 2.5}, "top-k 2.5 is not a whole number"),
    ("x", {"seed": True}, "seed True is not a whole number"),
    ("x", {"max_new_tokens": "5"}, "max-new-tokens '5' is not a whole number"),
    ("x", {"max_new_tokens": 2.5}, "max-new-tokens 2.5 is not a whole number"),
    ("x", {"max_new_tokens": 0}, "max-new-tokens 0 is out of range"),
    ("x", {"temperature": -1}, "temperature -1 is out of range"),
    ("x", {"temperature": 1e-7}, "temperature 1e-07 is out of range: use 0 (greedy) or >= 1e-05"),
    ("x", {"logit_bias": {260: 1.0}}, "logit_bias: token id 260 is outside the vocabulary"),
    ("x", {"top_logprobs": -1}, "top_logprobs -1 is out of range"),
    ("x", {"presence_penalty": "hot"}, "presence_penalty 'hot' is out of range"),
    ("x", {"frequency_penalty": 2.1}, "frequency_penalty 2.1 is out of range: use -2 .. 2"),
    ("x", {"regex": "a", "grammar": "b"}, "regex and grammar contradict each other"),
    ("x", {"stop": [""]}, "a stop string is empty"),
    ("x", {"stop": 3}, "stop 3 is no text and no list of texts"),
    ("x", {"stop": [3]}, "stop [3] is no text and no list of texts"),
    ("\ud800", {}, "prompt holds '\\ud800', half of a character"),
    (b"x", {}, "prompt b'x' is no text and no list of token ids"),
    ([1.5], {}, "prompt [1.5] is no text and no list of token ids"),
    (3, {}, "prompt 3 is no text and no list of token ids"),
    ([], {}, "the prompt is empty"),
    ({"messages": []}, {}, "messages is empty"),
    ({"messages": "x"}, {"think": True}, "think on: this model's chat template has no thinking"),
    ({"messages": ["x"]}, {}, "messages: 'x' is no dictionary of role and content"),
    ({"messages": [{"role": "user", "content": 3}]}, {}, "content 3 is no text"),
    ({"messages": "\udc00"}, {}, "content holds '\\udc00', half of a character"),
]


@pytest.mark.parametrize(("keywords", "message"), LOADED, ids=str)
def test_loading_from_python_names_the_argument(tiny_dir, keywords, message):
    with pytest.raises(FasteagleError) as caught:
        fasteagle.load(**{"model": str(tiny_dir), **keywords})
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def llm(tiny_dir):
    with fasteagle.load(str(tiny_dir), precision="fp32", drafter="none") as made:
        yield made


@pytest.mark.parametrize(("prompt", "keywords", "message"), ASKED, ids=str)
def test_asking_from_python_names_the_argument(llm, prompt, keywords, message):
    with pytest.raises(FasteagleError) as caught:
        if isinstance(prompt, dict):
            llm.chat(prompt["messages"], **keywords)
        else:
            llm.generate(prompt, **keywords)
    assert str(caught.value).startswith(message)
