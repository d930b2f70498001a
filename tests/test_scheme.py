"""Bytes of the weight formats, against figures worked out by hand."""

from __future__ import annotations

import pytest

from fasteagle.quant.scheme import BF16, INT4_G32, INT4_G128, INT8, grouped_bytes, int4_for
from fasteagle.registry import preset


def test_bytes_per_weight():
    assert grouped_bytes(4, 128) == 0.53125
    assert grouped_bytes(4, 64) == 0.5625
    assert grouped_bytes(4, 32) == 0.625


def test_model_bytes_by_hand():
    seven = preset("llama2-7b")
    linear, table = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 32000 * 4096
    assert BF16.model_bytes(seven) == 2 * (linear + 2 * table)
    assert INT8.model_bytes(seven) == linear + table + 2 * table
    assert INT4_G128.model_bytes(seven) == pytest.approx(0.53125 * linear + 3 * table)
    tied = preset("smollm2-135m")
    assert BF16.model_bytes(tied) == 2 * (tied.linear_params + 49152 * 576)
    assert INT8.model_bytes(tied) == tied.linear_params + 3 * 49152 * 576


def test_widths_decide_the_group():
    assert int4_for(preset("llama2-7b")) is INT4_G128
    assert int4_for(preset("smollm2-135m")) is INT4_G32  # 576 does not divide by 128
