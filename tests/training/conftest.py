"""Text that a random target wrote greedily, its features, and training on them."""

from __future__ import annotations

import pytest
import torch

from fasteagle.generate import Engine
from fasteagle.training.data import Features, cached_features
from fasteagle.training.train import Trainer, new_head
from helpers import random_target, tiny_config
from training_cases import OPTIONS, OPTIONS_3, talk


@pytest.fixture(scope="package")
def target():
    return random_target(tiny_config())


@pytest.fixture(scope="package")
def text(target):
    return talk(target)


@pytest.fixture
def store(target, text, tmp_path) -> Features:
    return cached_features(Engine(target, 256), text, tmp_path / "features")


@pytest.fixture
def store_3(target, text, tmp_path) -> Features:
    """Return features with the auxiliary hidden states that an EAGLE-3 head reads."""
    layers = OPTIONS_3.aux_layers_of(target.config.n_layer)
    return cached_features(Engine(target, 256), text, tmp_path / "aux", aux_layers=layers)


@pytest.fixture
def trainer(target, store, tmp_path):
    """Makes the training of a new draft head on `store`; the first conversations are held out."""

    def make(
        options=OPTIONS, folder="run", store=store, held_out=(0, 1, 2), identity=""
    ) -> Trainer:
        head = new_head(target, torch.arange(40), options)
        ids, folder = torch.arange(options.loss_vocab_size), tmp_path / folder
        return Trainer(head, target, store, list(held_out), ids, options, folder, identity)

    return make
