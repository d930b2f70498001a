"""Choosing the device and the dtype that a model is loaded with."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fasteagle.device import _auto_device, accumulate_on, pick_device, pick_dtype
from fasteagle.errors import FasteagleError
from helpers import raising

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({}, "fp32"),
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, "fp32"),
        ({"avx512_bf16": True}, "bf16"),
        ({"amx_bf16": True, "avx512_bf16": False}, "bf16"),
        ({"bf16": True}, "bf16"),
        ({"arm_bf16": True}, "bf16"),
    ],
)
def test_the_cpus_dtype_is_bf16_where_it_multiplies_that(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert pick_dtype("auto", CPU) == dtype
    assert pick_dtype("auto", CPU, quantized=True) == "bf16"  # what the kernels take
    for name in ("fp32", "bf16", "fp16"):
        assert pick_dtype(name, CPU) == name


@pytest.fixture
def cards(monkeypatch):
    """Makes CUDA look as said: how many cards, and of which capability."""
    _auto_device.cache_clear()

    def set_up(count, capability=(8, 6), init=None, built_for="13.0"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
        monkeypatch.setattr(torch.cuda, "init", init or (lambda: None))
        monkeypatch.setattr(torch.version, "cuda", built_for)

    yield set_up
    _auto_device.cache_clear()


def refusal(name):
    with pytest.raises(FasteagleError) as caught:
        pick_device(name)
    return str(caught.value)


def test_devices(cards):
    cards(0)
    assert pick_device("auto") == pick_device("cpu") == CPU
    cards(1)
    assert pick_device("cuda:0") == torch.device("cuda:0")
    assert refusal("cuda:1") == "device 'cuda:1': 1 CUDA devices found: use --device cpu"
    assert refusal("tpu") == "device 'tpu' is unknown: use auto, cpu, cuda or cuda:N"


def test_a_card_that_is_too_old(cards, capsys):
    cards(1, capability=(7, 0))
    reason = "Tesla V100 is sm_70, the kernels need sm_80 (Ampere) or newer"
    assert refusal("cuda") == f"device 'cuda': {reason}: use --device cpu"
    assert pick_device("auto") == pick_device("auto") == CPU
    assert capsys.readouterr().err == f"warning: the CPU is used: {reason}\n", "said once"


def test_a_card_without_triton(cards, monkeypatch):
    cards(1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("cuda") == (
        "device 'cuda': its kernels need Triton, which is not installed (pip install triton): use "
        "--device cpu"
    )


def test_a_driver_older_than_the_runtime(cards, capsys):
    said = "The NVIDIA driver on your system is too old (found version 11040). Please update\nmore"
    cards(0, init=raising(RuntimeError(said)))
    assert refusal("cuda") == (
        "device 'cuda': 0 CUDA devices found (The NVIDIA driver on your system is too old (found "
        "version 11040)): use --device cpu"
    )
    assert pick_device("auto") == pick_device("auto") == CPU
    assert capsys.readouterr().err == (
        "warning: the CPU is used: The NVIDIA driver on your system is too old (found version "
        "11040)\n"
    )


@pytest.mark.parametrize(
    "said", ["Found no NVIDIA driver on your system. Please check", "No CUDA GPUs are available"]
)
def test_a_machine_without_a_card_needs_no_line(cards, capsys, said):
    """The usual torch is built for CUDA and finds no driver there."""

    cards(0, init=raising(RuntimeError(said)))
    assert pick_device("auto") == CPU and capsys.readouterr().err == ""


def test_a_torch_without_cuda(cards):
    cards(0, built_for=None)
    assert "0 CUDA devices found, and this torch is built for CPUs" in refusal("cuda:0")


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("NVIDIA GeForce RTX 3090", (8, 6), "fp16"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "fp16"),
        ("NVIDIA GeForce RTX 5090", (12, 0), "fp16"),
        ("NVIDIA RTX A6000", (8, 6), "fp32"),
        ("NVIDIA L40S", (8, 9), "fp32"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "fp32"),
        ("NVIDIA H200", (9, 0), "fp32"),
    ],
)
def test_sums_in_fp16_where_they_are_twice_as_fast(monkeypatch, name, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert accumulate_on("cuda") == expected
    assert accumulate_on("cpu") == "fp32"
