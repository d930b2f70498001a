"""Names of weight formats, and their bytes against figures worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from fasteagle.config import HeadConfig, ModelConfig, MoEConfig, draft_block
from fasteagle.errors import FasteagleError
from fasteagle.loading.registry import preset
from fasteagle.quant.scheme import BF16, INT8, Scheme, grouped_bytes, int4_for, parse_scheme

SEVEN, SMALL = preset("llama2-7b"), preset("smollm2-135m")


def test_bytes_per_weight():
    assert grouped_bytes(4, 128) == 0.53125
    assert grouped_bytes(4, 64) == 0.5625
    assert grouped_bytes(4, 32) == 0.625
    assert grouped_bytes(8, 32) == 1.0625


def test_model_bytes_by_hand():
    linear, table = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 32000 * 4096
    assert BF16.model_bytes(SEVEN) == 2 * (linear + 2 * table)
    assert INT8.model_bytes(SEVEN) == linear + table + 2 * table
    int4 = parse_scheme("int4-g128", SEVEN)
    assert int4.model_bytes(SEVEN) == pytest.approx(0.53125 * linear + 3 * table)
    all_int4 = parse_scheme("int4-g128", SEVEN, head_bits=4)
    assert all_int4.model_bytes(SEVEN) == pytest.approx(0.53125 * (linear + table) + 2 * table)
    int8 = parse_scheme("int8", SEVEN, head_bits=4)
    assert int8.model_bytes(SEVEN) == linear + 0.625 * table + 2 * table
    grouped = Scheme(8, 32, "own", head_bits=8)
    assert grouped.model_bytes(SEVEN) == 1.0625 * (linear + table) + 2 * table
    assert BF16.model_bytes(SMALL) == 2 * (SMALL.linear_params + 49152 * 576)
    assert INT8.model_bytes(SMALL) == SMALL.linear_params + 3 * 49152 * 576


def test_a_draft_head_has_the_format_of_its_target():
    own, linear = HeadConfig(draft_block(SEVEN), 8000), 6 * 4096**2 + 3 * 4096 * 11008
    assert BF16.draft_head_bytes(own) == 2 * (linear + 8000 * 4096)
    assert parse_scheme("int4-g128", SEVEN).draft_head_bytes(own) == 0.53125 * linear + 8000 * 4096


def mixture(**changes) -> ModelConfig:
    return dataclasses.replace(SEVEN, moe=MoEConfig(8, 2, 1024, **changes))


def test_routers_stay_in_fp32():
    config = mixture()
    linear, table = 32 * (4 * 4096**2 + 8 * 3 * 4096 * 1024), 32000 * 4096
    assert INT8.model_bytes(config) == linear + 3 * table + 4 * 32 * 8 * 4096


def test_the_widest_group_that_fits():
    assert int4_for(SEVEN) == Scheme(4, 128, "hqq", 8)
    assert int4_for(SMALL).group_size == 64  # 576 does not divide by 128
    # 11,040, which no wider groups than 32 divide, counts where a block has no experts.
    odd = dataclasses.replace(mixture(), ffn_dim=11040)
    assert int4_for(odd).group_size == 128
    assert int4_for(dataclasses.replace(odd, dense_blocks=(0,))).group_size == 32
    assert int4_for(mixture(shared_ffn_dim=1088)).group_size == 64
    wide = dataclasses.replace(SEVEN, n_head=33, n_kv_head=33, head_dim=96)
    assert int4_for(wide).group_size == 32  # of 3,168 outputs of attention


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("int8", Scheme(8, 0, "minmax", 8)),
        ("int8-g32", Scheme(8, 32, "minmax", 8)),
        ("int4", Scheme(4, 128, "hqq", 8)),
        ("int4-g64", Scheme(4, 64, "minmax", 8)),
        ("int4-g128-hqq", Scheme(4, 128, "hqq", 8)),
    ],
)
def test_names(name, scheme):
    assert parse_scheme(name, SEVEN) == scheme
    if name != "int4":
        assert parse_scheme(scheme.name, SEVEN) == scheme


def test_values_of_the_file_are_another_format_than_ours():
    """Records of measurements carry the name."""
    assert Scheme(8, 32, "own").name == "int8-g32-own" != parse_scheme("int8-g32", SEVEN).name
    assert Scheme(4, 128, "own").name == "int4-g128-own"
    assert Scheme(8, 32, "own").option == "--int8" and INT8.option == "--precision int8"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8", "'fp8' is unknown: use for example int4"),
        ("int3-g64", "3 bits have no kernel"),
        ("int4-g64-awq", "method 'awq' is not one of: minmax, hqq"),
        ("int4-g32-gptq", "'int4-g32-gptq' is gone: use int4-g32-hqq, or a checkpoint"),
        ("int8-g32-hqq", "none for int8"),
        ("int4-g16", "group size 16 has no kernel: use g128, g64, g32"),
        ("int8-g64", "group size 64 has no kernel: use g32"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(FasteagleError, match=message):
        parse_scheme(name, SEVEN)


def test_groups_that_do_not_divide():
    with pytest.raises(FasteagleError, match=r"groups of 128 do not divide .*576, 1536\): use g64"):
        parse_scheme("int4-g128", SMALL)
