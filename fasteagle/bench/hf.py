"""Hugging Face transformers over our weights: the usual baseline, and a test oracle."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import Tensor

from fasteagle.bench.row_spec import LOOKUP_TOKENS, RowSpec
from fasteagle.bench.rows import Decoder, Turn
from fasteagle.config import ModelConfig
from fasteagle.config_hf import ERNIE, MIMO
from fasteagle.errors import FasteagleError
from fasteagle.loading.heads.tables import layer_config
from fasteagle.loading.names import expected_shapes
from fasteagle.loading.tensors import Checkpoint
from fasteagle.options import DraftOptions, SamplingParams


def hf_config(config: ModelConfig) -> Any:
    """Return the transformers configuration of a model of ours.

    Raises `FasteagleError` for mixtures of experts, which would need their tensors stacked, for
    Ernie-4.5, whose rows have another order there, and for RoPE with a factor for each frequency,
    which no configuration has.
    """
    if config.moe is not None or config.architecture == ERNIE:
        raise FasteagleError(
            "rows of transformers run dense models only, and not Ernie-4.5: leave them out"
        )
    if config.rope_freq_factors is not None:
        raise FasteagleError(
            "rows of transformers cannot scale RoPE as this GGUF file does: leave them out"
        )
    import transformers  # takes seconds: only for rows of its own

    architecture = "Qwen2ForCausalLM" if config.architecture == MIMO else config.architecture
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    made = kind.from_dict(
        layer_config(config, torch.float32)
        | {
            "architectures": [architecture],
            "model_type": kind.model_type,
            "num_hidden_layers": config.n_layer,
            "tie_word_embeddings": config.tie_embeddings,
        }
    )
    if config.architecture == "MistralForCausalLM":
        made.sliding_window = config.sliding_window
    return made


def hf_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Any:
    """Return a transformers model that holds the checkpoint's (dequantized) weights in `dtype`."""
    import transformers  # takes seconds: only for rows of its own

    config = hf_config(checkpoint.config)
    config._attn_implementation = "sdpa"
    kind = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model = kind(config)
    names = expected_shapes(checkpoint.config)  # a layer for multi-token prediction is left out
    state = {name: checkpoint.load(name).to(device=device, dtype=dtype) for name in names}
    if checkpoint.config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    # Non-persistent buffers are not in any checkpoint: make them again, on the device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    return model.eval()


class _Clock:
    """Streamer of transformers that records when prompt and tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []  # tokens that came with each time

    def put(self, value: Tensor) -> None:
        self.sizes.append(value.numel())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class HFDecoder(Decoder):
    """Decoder with transformers' `generate` on our weights, with prompt lookup or without."""

    def __init__(
        self, model: Any, params: SamplingParams, eos_ids: frozenset[int], lookup: bool = False
    ) -> None:
        self.model, self.params, self.eos_ids = model, params, eos_ids
        self.options: dict[str, Any] = {"do_sample": False}
        if not params.greedy:
            self.options = {
                "do_sample": True,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p or None,
            }
        if lookup:
            self.options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
            self.tree = RowSpec("hf-pld").planned_tree(DraftOptions(), False)

    def close(self) -> None:
        del self.model

    @torch.no_grad()
    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        torch.manual_seed(self.params.seed)
        clock = _Clock()
        calls: list[None] = []
        hook = self.model.register_forward_hook(lambda *_: calls.append(None))
        ids = torch.tensor([prompt], device=self.model.device)
        start = time.perf_counter()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.eos_ids) or None,
            pad_token_id=min(self.eos_ids, default=0),
            repetition_penalty=self.params.repetition_penalty,
            streamer=clock,
            **self.options,
        )
        hook.remove()
        times, sizes = clock.times[1:], clock.sizes[1:]  # the prompt comes first
        gaps = (b - a for a, b in itertools.pairwise(times))
        return Turn(
            output[0, len(prompt) :].tolist(),
            times[0] - start,
            times[-1] - times[0],
            len(calls) - 1,
            first=sizes[0],  # prompt lookup may bring several with the first pass
            prompt_tokens=len(prompt),
            chunks=tuple(zip(sizes[1:], gaps, strict=True)),
        )
