"""Training in a few steps on what a tiny target wrote."""

from __future__ import annotations

import torch

from fasteagle.generate import Engine
from fasteagle.prompts import Conversation
from fasteagle.training.options import TrainOptions
from fasteagle.training.train import new_head
from helpers import generated

_TRAINED = {"lr": 3e-3, "batch_tokens": 200, "steps": 30, "warmup": 5}
OPTIONS = TrainOptions(**_TRAINED, draft_vocab_size=40, loss_vocab_size=30)
_TRAINED_3 = {**_TRAINED, "draft_vocab_size": 40, "loss_vocab_size": 40}
OPTIONS_3 = TrainOptions("eagle3", tap_layers=(0, 1, 2), self_fed_steps=2, **_TRAINED_3)


def new_head_ready(target, options):
    head = new_head(target, torch.arange(40), options)
    head.borrow(target, 256)
    return head


def talk(target, n=24, seed=0) -> list[Conversation]:
    """Conversations that the target answered greedily."""
    g = torch.Generator().manual_seed(seed)
    engine, conversations = Engine(target, 256), []
    for _ in range(n):
        size = int(torch.randint(4, 9, (1,), generator=g))
        prompt = torch.randint(0, 60, (size,), generator=g).tolist()
        answer = generated(engine, 20, prompt)
        conversations.append(Conversation(prompt + answer, size, True))
    return conversations
