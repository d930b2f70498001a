"""A server of a tiny model in a thread of this process, for clients over loopback."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="needs the extra [serve]")

from tokenizers.pre_tokenizers import ByteLevel

import fasteagle
from fasteagle.answering.answer import Chunk
from fasteagle.answering.prefix_cache import PrefixCache
from fasteagle.decoding.stats import Stats
from fasteagle.options import AnswerOptions, ServeOptions
from fasteagle.server import run as running
from fasteagle.server.app import Server
from fasteagle.server.prepare import Defaults
from helpers import save_tiny

# A letter's token id: biased by 100 it is always drawn, and n-grams guess it.
LETTER = "q"
LETTER_ID = sorted(ByteLevel.alphabet()).index(LETTER)


class Live:
    """A server that runs, and where it is."""

    def __init__(self, server: Server, port: int, running: running.GracefulServer) -> None:
        self.server, self.port, self.running = server, port, running
        self.url = f"http://127.0.0.1:{port}"
        self.llm = server.llm


@contextlib.contextmanager
def serving(llm, options=None, defaults=None, api_key=None):
    options = options or ServeOptions(port=0)
    server = Server(llm, options, defaults or Defaults(answer=AnswerOptions(16)), api_key)
    found = running.listen(options)
    made = []
    original = running.GracefulServer.__init__

    def kept(self, *args):
        original(self, *args)
        made.append(self)

    running.GracefulServer.__init__ = kept
    thread = threading.Thread(target=running.run, args=(server, found, print), daemon=True)
    try:
        thread.start()
        while not made or not made[0].started:
            time.sleep(0.01)
    finally:
        running.GracefulServer.__init__ = original
    try:
        yield Live(server, found.getsockname()[1], made[0])
    finally:
        made[0].should_exit = made[0].force_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def serve_dir(tmp_path_factory):
    """A tiny model whose tokenizer goes through every character."""
    return save_tiny(tmp_path_factory.mktemp("serve") / "tiny-model", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def loaded(serve_dir):
    llm = fasteagle.load(str(serve_dir), precision="fp32", drafter="ngram", max_seq_len=2048)
    llm.prefix_cache = PrefixCache(2**28)
    return llm


@pytest.fixture(scope="session")
def live(loaded):
    with serving(loaded) as found:
        yield found


@pytest.fixture
def plant(live, monkeypatch):
    """Make the model want to write a text; where a grammar does not allow it, something else."""

    def set_text(text):
        tokenizer, vocab_size = live.llm.tokenizer, live.llm.engine.model.config.vocab_size
        end = min(tokenizer.eos_ids)

        def stream(request, check=lambda: None):
            wanted = [*tokenizer.encode(text), *[end] * request.answer.max_new_tokens]
            stats = live.llm.engine.stats = Stats(prompt_tokens=len(request.prompt))
            while not stats.finish:
                check()
                token = wanted[stats.new_tokens]
                if request.mask is not None:
                    allowed = request.mask.rows([0], [0], [True], vocab_size)[0]
                    token = token if allowed[token] else int(allowed.nonzero()[0])
                    request.mask.advance([token])
                stats.new_tokens += 1
                if token in tokenizer.eos_ids:
                    stats.finish = "eos"
                elif stats.new_tokens == request.answer.max_new_tokens:
                    stats.finish = "length"
                yield Chunk(tokenizer.decode([token]), (token,))

        monkeypatch.setattr(live.llm, "stream", stream)

    return set_text
