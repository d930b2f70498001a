"""The model's name and size, and its tokenizer for clients that count."""

from __future__ import annotations

import httpx
import pytest
from live_server import SHORT


def post(live, path, **body):
    return httpx.post(live.url + path, json=body)


def test_the_size_of_the_context_is_told(live):
    size = live.llm.engine.max_seq_len
    (model,) = httpx.get(f"{live.url}/v1/models").json()["data"]
    assert (model["object"], model["owned_by"]) == ("model", "fasteagle")
    assert model["max_model_len"] == size and type(model["created"]) is int
    assert post(live, "/tokenize", prompt="abc").json()["max_model_len"] == size


def test_a_name_may_have_a_slash(live, monkeypatch):
    monkeypatch.setattr(live.server, "name", "someone/model")
    assert httpx.get(f"{live.url}/v1/models/someone/model").json()["id"] == "someone/model"
    assert httpx.get(f"{live.url}/v1/models/someone").status_code == 404


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
)
def test_another_model_has_other_tokens(live, path, body):
    assert post(live, path, model=live.server.name, **body).status_code == 200
    reply = post(live, path, model="gpt-5", **body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_a_conversation_without_the_beginning_of_an_answer(live):
    whole, part = (
        post(live, "/tokenize", messages=SHORT["messages"], add_generation_prompt=added).json()
        for added in (True, False)
    )
    assert part["count"] == whole["count"] - 1 and part["tokens"] == whole["tokens"][:-1]


def test_the_longest_text_and_the_most_messages_that_are_read(live):
    """A token has at most 16 characters on average, a message at least one token."""
    most = live.llm.engine.max_seq_len
    for more, status in ((0, 200), (1, 400)):
        assert post(live, "/tokenize", prompt="x" * (16 * most + more)).status_code == status
        messages = [{"role": "user", "content": ""}] * (most + more)
        assert post(live, "/tokenize", messages=messages).status_code == status
    assert live.server.queue.n_waiting == 0  # neither has a place any more


def test_the_last_token_and_the_first_that_is_none(live):
    n_tokens = live.llm.engine.model.config.vocab_size
    assert post(live, "/detokenize", tokens=[0, n_tokens - 1]).status_code == 200
    most = [1] * live.llm.engine.max_seq_len
    assert post(live, "/detokenize", tokens=most).status_code == 200
    reply = post(live, "/detokenize", tokens=[*most, 1])
    assert reply.status_code == 400 and "2,049 are more than max-seq-len 2,048" in reply.text
    for token in (-1, n_tokens):
        reply = post(live, "/detokenize", tokens=[token])
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "tokens"
