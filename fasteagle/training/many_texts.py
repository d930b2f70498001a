"""Many texts of a small dense model at once on one device, and its features on them.

`LocalModel` shares passes of a few texts. Here a step computes a token of each of a thousand, with
a cache of its own format; weights are dense, draws are the device's.

Shapes: B texts, G KV heads, E head dim, S cache slots of a text, T rows of a pass, D model dim,
R auxiliary layers.
"""

from __future__ import annotations

import heapq
import importlib.util
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasteagle.errors import FasteagleError
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.model import Ops, RMSNorm, Transformer
from fasteagle.options import SamplingParams
from fasteagle.prompts import Conversation
from fasteagle.training.dialogues import Reply, Request
from fasteagle.training.filters import ends_in_repetition
from fasteagle.training.local_model import prompt_of

STEPS = 16  # between two looks at what has ended
LOOKS = 4  # between two looks for repetition in a text
LEAST_DIM = 16  # of a head, for products on tensor cores
WARM_UP = 3  # steps before a graph is captured


def require_whole(model: Transformer, length: int) -> None:
    """Raise `FasteagleError` where a text of this length is longer than the sliding window."""
    window = model.config.sliding_window
    if window is not None and length > window:
        raise FasteagleError(
            f"texts of {length:,} tokens exceed the sliding window of {window:,}: lower --max-len"
        )


def norm(module: nn.Module, x: Tensor) -> Tensor:
    """Return `module(x)`, a norm in one kernel."""
    if not isinstance(module, RMSNorm):
        normed: Tensor = module(x)
        return normed
    weight = module.weight
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), module.eps).to(weight.dtype)


def write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [G, B, E] into slots [B] of a cache [B, G, S, E]."""
    cache[torch.arange(len(cache), device=cache.device), :, slots] = rows.transpose(0, 1)


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, last: Tensor) -> Tensor:
    """Return attention [G, group * B, E] of q of that shape over caches [B, G, S, E].

    Text b sees its slots up to `last[b]`.
    """
    B, G, S, E = k_cache.shape
    fits = E >= LEAST_DIM and E & (E - 1) == 0  # the kernel
    if fits and q.is_cuda and importlib.util.find_spec("triton") is not None:
        from fasteagle.training.many_texts_kernel import attend_prefixes

        return attend_prefixes(q, k_cache, v_cache, last)
    visible = torch.arange(S, device=q.device) <= last[:, None]  # [B, S]
    rows = q.view(G, -1, B, E).permute(2, 0, 1, 3)  # [B, G, group, E]
    y = F.scaled_dot_product_attention(rows, k_cache, v_cache, visible[:, None, None])
    return y.permute(1, 2, 0, 3).reshape(q.shape)


DECODING = Ops(attend=attend, write=write, norm=norm, views=True)


class ManyTexts:
    """Model that answers requests as `LocalModel` does: `slots` texts of up to `length` tokens.

    Requests beyond the number of slots wait. They name no more than a temperature; their seed is
    not used. Raises `FasteagleError` for texts longer than the model's sliding window.
    """

    def __init__(
        self, model: Transformer, tokenizer: ChatTokenizer, slots: int, length: int
    ) -> None:
        require_whole(model, length)
        config, weight = model.config, model.norm.weight
        self._model, self._tokenizer, self._length = model, tokenizer, length
        self._device = device = weight.device
        shape = (slots, config.n_kv_head, length, config.head_dim)
        layers = [
            tuple(torch.zeros(shape, dtype=weight.dtype, device=device) for _ in range(2))
            for _ in range(config.n_layer)
        ]
        self._cache: Any = SimpleNamespace(layers=layers)
        self._rows = model.lm_head.weight.detach().float()
        is_end = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_end[sorted(tokenizer.eos_ids)] = True
        self._is_end = is_end.to(device)
        self._ids = torch.zeros(slots, length, dtype=torch.long, device=device)
        self._known = torch.ones(slots, dtype=torch.long, device=device)  # tokens of each text
        self._begin = torch.zeros_like(self._known)  # of each answer
        self._at = torch.zeros_like(self._known)  # place of the token that is read next
        self._limit = torch.ones_like(self._known)
        self._temperature = torch.zeros(slots, device=device)
        self._halted = torch.ones(slots, dtype=torch.bool, device=device)
        self._numbers: list[int | None] = [None] * slots
        self._prompts: dict[int, list[int]] = {}
        self._waiting: list[tuple[int, list[int], Request]] = []  # heap: who began first is first
        self._without_room: list[int] = []
        self._graph: Any = None
        self._looks = 0

    def begin(self, number: int, request: Request) -> None:
        params = request.params
        if params != SamplingParams(params.temperature, seed=params.seed):
            raise FasteagleError("many texts at once are drawn by their temperature alone")
        prompt = prompt_of(self._tokenizer, request)
        if len(prompt) >= self._length:
            self._without_room.append(number)
        else:
            heapq.heappush(self._waiting, (number, prompt, request))

    def replies(self) -> list[tuple[int, Reply | None]]:
        """Return what has been answered; steps for what comes next are computed meanwhile."""
        replies: list[tuple[int, Reply | None]] = [(number, None) for number in self._without_room]
        self._without_room = []
        replies += self._ended()
        self._fill()
        self._launch()
        return replies

    def _ended(self) -> list[tuple[int, Reply]]:
        """Return the texts that have ended by now, and free their slots."""
        halted, known, ids = self._halted.tolist(), self._known.tolist(), self._ids.cpu()
        self._looks += 1
        replies = []
        for slot, number in enumerate(self._numbers):
            if number is None:
                continue
            looked_at = slot % LOOKS == self._looks % LOOKS
            if not halted[slot] and not looked_at:
                continue
            begin = len(self._prompts[number])
            text = ids[slot, begin : known[slot]].tolist()
            if not halted[slot] and not ends_in_repetition(text):
                continue
            self._numbers[slot] = None
            is_cut = text[-1] not in self._tokenizer.eos_ids
            reply = Reply(self._prompts.pop(number), text, self._tokenizer.decode(text), is_cut)
            replies.append((number, reply))
        return replies

    def _fill(self) -> None:
        """Give free slots to requests that wait."""
        free = [slot for slot, number in enumerate(self._numbers) if number is None]
        n = min(len(free), len(self._waiting))
        chosen = [(slot, *heapq.heappop(self._waiting)) for slot in free[:n]]
        if not chosen:
            return
        rows = torch.zeros(len(chosen), self._length, dtype=torch.long)
        for row, (slot, number, prompt, _) in zip(rows, chosen, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
            self._numbers[slot], self._prompts[number] = number, prompt
        slots = self._to_device([slot for slot, *_ in chosen])
        lengths = [len(prompt) for _, _, prompt, _ in chosen]
        most = [request.max_new_tokens for *_, request in chosen]
        limits = [min(self._length, sum(both)) for both in zip(lengths, most, strict=True)]
        self._ids[slots] = rows.to(self._device)
        self._known[slots] = self._begin[slots] = self._to_device(lengths)
        self._limit[slots] = self._to_device(limits)
        self._at[slots] = 0
        self._halted[slots] = False
        temperatures = [float(request.params.temperature) for *_, request in chosen]
        self._temperature[slots] = self._to_device(temperatures)

    def _to_device(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values).to(self._device)

    def _launch(self) -> None:
        """Compute `STEPS` tokens of every text; on a GPU this returns before they are done."""
        if self._device.type != "cuda":
            for _ in range(STEPS):
                self._step()
            return
        with torch.cuda.device_of(self._ids):
            if self._graph is None:
                for _ in range(WARM_UP):
                    self._step()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._step()
                self._graph = graph
            for _ in range(STEPS):
                self._graph.replay()

    @torch.no_grad()
    def _step(self) -> None:
        """Read one token of each text, and draw the next one of those that have no further ones.

        A text that has halted reads its last token again, which changes nothing.
        """
        at = self._at
        tokens = self._ids.gather(1, at[:, None])[:, 0]
        features, _ = self._model.encode(tokens, at, at, at, self._cache, ops=DECODING)
        logits = features.float() @ self._rows.T
        is_drawn = self._temperature > 0
        scale = torch.where(is_drawn, 1 / self._temperature, 1.0)
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-30).log_()
        drawn = (logits * scale[:, None] - noise * is_drawn[:, None]).argmax(-1)
        after = at + 1
        is_last = after >= self._known
        has_ended = self._is_end[tokens] & (at >= self._begin)
        halted = is_last & (has_ended | (after >= self._limit))
        grows = is_last & ~halted
        place = after.clamp(max=self._length - 1)[:, None]
        present = self._ids.gather(1, place)[:, 0]
        self._ids.scatter_(1, place, torch.where(grows, drawn, present)[:, None])
        self._known += grows
        self._at.copy_(torch.where(halted, at, after))
        self._halted.copy_(halted)


def attend_texts(B: int, q: Tensor, k: Tensor, v: Tensor, _: Any) -> Tensor:
    """Return attention [G, group * T, E] of B whole texts of one length, T rows in all.

    q has that shape, k and v are [G, T, E].
    """
    G, T, E = k.shape
    texts = q.view(G, -1, B, T // B, E).permute(2, 0, 1, 3, 4)  # [B, G, group, length, E]
    k, v = (t.view(G, B, -1, E).transpose(0, 1) for t in (k, v))
    rows = texts.flatten(1, 2)
    y = F.scaled_dot_product_attention(rows, k, v, is_causal=True, enable_gqa=True)
    return y.view(texts.shape).permute(1, 2, 0, 3, 4).reshape(q.shape)


def overwrite(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Replace the keys or values in a cache [G, T, E] by `rows` of that shape."""
    cache.copy_(rows)


@torch.no_grad()
def features_of(
    model: Transformer,
    conversations: Sequence[Conversation],
    aux_layers: tuple[int, ...] = (),
    batch_tokens: int = 1 << 15,
) -> list[Tensor]:
    """Return features [n, (R + 1) * D] of each conversation, on the model's device, several a pass.

    The last D columns are what the LM head reads, those before the auxiliary hidden states.
    """
    device, dtype = model.norm.weight.device, model.norm.weight.dtype
    require_whole(model, max((len(c.ids) for c in conversations), default=0))
    order = sorted(range(len(conversations)), key=lambda i: len(conversations[i].ids))
    features: list[Tensor] = [torch.empty(0)] * len(order)
    while order:
        L = len(conversations[order[-1]].ids)
        n = max(1, batch_tokens // L)
        chosen, order = order[-n:], order[:-n]
        B = len(chosen)
        rows = torch.zeros(B, L, dtype=torch.long)
        for row, i in zip(rows, chosen, strict=True):
            ids = conversations[i].ids
            row[: len(ids)] = torch.tensor(ids)

        shape = (model.config.n_kv_head, B * L, model.config.head_dim)
        planes = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        cache: Any = SimpleNamespace(layers=[planes] * model.config.n_layer)
        positions = torch.arange(L, device=device).repeat(B)
        ops = Ops(partial(attend_texts, B), overwrite, norm, views=True)
        last, aux = model.encode(
            rows.flatten().to(device), positions, positions, positions, cache, aux_layers, ops
        )
        wide = last if aux is None else torch.cat((aux.to(dtype), last), dim=-1)
        for i, part in zip(chosen, wide.to(torch.bfloat16).view(B, L, -1), strict=True):
            features[i] = part[: len(conversations[i].ids)]
    return features
