"""Rows of transformers: the configuration of a model there, and what `generate` is asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from fasteagle.bench.hf import HFDecoder, hf_config
from fasteagle.bench.row_spec import LOOKUP_TOKENS
from fasteagle.config import Llama3RopeScaling
from fasteagle.config_hf import ERNIE, from_hf
from fasteagle.errors import FasteagleError
from fasteagle.options import SamplingParams
from helpers import tiny_config


@pytest.mark.parametrize(
    "options",
    [
        {"rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 64), "rope_base": 5e5},
        {"rope_linear_factor": 2.0, "norm_eps": 1e-3},
        {"architecture": "MistralForCausalLM", "sliding_window": 7},
        {"architecture": "MistralForCausalLM", "sliding_window": None},
        {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "tie_embeddings": True},
        {"architecture": "Qwen3ForCausalLM", "qk_norm": True},
    ],
    ids=str,
)
def test_transformers_gets_the_whole_config(options):
    config = tiny_config(**options)
    assert from_hf(hf_config(config).to_dict(), "config.json") == config


def test_query_and_key_rows_in_pairs_are_refused():
    with pytest.raises(FasteagleError, match="not Ernie-4.5: leave them out"):
        hf_config(tiny_config(architecture=ERNIE))


def test_factors_by_frequency_are_refused():
    """A GGUF file of Llama 3.1 has them in place of a rule."""
    with pytest.raises(FasteagleError, match="cannot scale RoPE as this GGUF file does"):
        hf_config(tiny_config(rope_freq_factors=(1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0)))


class Model:
    """A model of transformers that answers 5 and 6, in two passes or in one with lookup."""

    device = "cpu"

    def __init__(self, pieces):
        self.pieces = pieces  # of the answer, each with its pass

    def register_forward_hook(self, hook):
        self.hook = hook
        return self

    def remove(self):
        self.hook = None

    def generate(self, ids, streamer, **options):
        self.options, self.seed = options, torch.initial_seed()
        streamer.put(ids[0])
        for piece in self.pieces:
            self.hook()
            streamer.put(torch.tensor(piece))
        streamer.end()
        return torch.cat((ids, torch.tensor([[*itertools.chain(*self.pieces)]])), dim=1)


SAMPLED = SamplingParams(0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, seed=3)


def test_sampling_is_asked_for_with_every_parameter():
    model = Model([[5], [6]])
    turn = HFDecoder(model, SAMPLED, frozenset({9, 7})).turn([1, 2, 3], 20)
    passed = {name: value for name, value in model.options.items() if name != "attention_mask"}
    drawn = dict(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    ends = dict(max_new_tokens=20, eos_token_id=[7, 9], pad_token_id=7)
    assert passed == {**drawn, "repetition_penalty": 1.2, **ends}
    assert model.seed == 3
    assert (turn.tokens, turn.first, turn.passes, turn.prompt_tokens) == ([5, 6], 1, 1, 3)
    assert [n for n, _ in turn.chunks] == [1]


def test_prompt_lookup_may_bring_several_tokens_with_a_pass(monkeypatch):
    clock = iter((10.0, 10.5, 11.0, 13.0))
    monkeypatch.setattr("fasteagle.bench.hf.time.perf_counter", lambda: next(clock))
    model = Model([[5, 6], [7, 8, 9]])
    decoder = HFDecoder(model, SamplingParams(), frozenset(), lookup=True)
    turn = decoder.turn([1, 2], 5)
    assert model.options["prompt_lookup_num_tokens"] == LOOKUP_TOKENS
    assert model.options["do_sample"] is False and model.options["eos_token_id"] is None
    assert (turn.tokens, turn.first, turn.passes) == ([5, 6, 7, 8, 9], 2, 1)
    assert (turn.ttft, turn.seconds, turn.chunks) == (1.0, 2.0, ((3, 2.0),))
    assert decoder.tree is not None and decoder.tree.depth == LOOKUP_TOKENS
