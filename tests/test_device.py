"""Choosing the device and the dtype that a model is loaded with."""

from __future__ import annotations

import pytest
import torch

from fasteagle.device import pick_device, pick_dtype
from fasteagle.errors import FasteagleError

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


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto") == pick_device("cpu") == CPU
    assert pick_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(FasteagleError, match="device 'cuda:1': 1 CUDA devices found"):
        pick_device("cuda:1")
    with pytest.raises(FasteagleError, match="device 'tpu' is not one: use auto, cpu, cuda or"):
        pick_device("tpu")
