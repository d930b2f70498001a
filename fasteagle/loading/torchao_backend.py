"""Weight-only formats and kernels of torchao, for comparison."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fasteagle.errors import FasteagleError, with_progress
from fasteagle.model import Transformer
from fasteagle.quant.scheme import Scheme, parse_scheme


def quantize_with_torchao(
    model: Transformer, name: str, head_bits: int, notify: Callable[[str], None]
) -> None:
    """Quantize block linears in place, and the LM head unless it stays in 16 bits.

    The embedding keeps a dense copy where it is tied. `notify` gets a line at first and now and
    then. Raises `FasteagleError` for what torchao cannot do on this device.
    """
    if model.config.moe is not None:
        raise FasteagleError("torchao does not run experts: leave -torchao out of the precision")
    notify(f"torchao quantizes to {name} (at every start) ...")
    with _quiet_import():
        from torchao.quantization import quantize_  # takes seconds

    scheme = parse_scheme(name, model.config, head_bits)
    on_cpu = model.norm.weight.device.type == "cpu"
    if scheme.head_bits != 16:
        head = nn.Linear(model.config.dim, model.config.vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
        quantize_(head, _config(Scheme(8) if scheme.head_bits == 8 else scheme, on_cpu))
        model.lm_head = head
    for block in with_progress(list(model.blocks), "quantized", "blocks", notify):
        quantize_(block, _config(scheme, on_cpu))


def _config(scheme: Scheme, on_cpu: bool) -> Any:
    from torchao import quantization  # takes seconds

    if scheme.bits == 8:
        if scheme.group_size:
            granularity: Any = quantization.PerGroup(scheme.group_size)
        else:
            granularity = quantization.PerRow()
        return quantization.Int8WeightOnlyConfig(granularity=granularity)
    algorithm = "hqq" if scheme.method == "hqq" else "tinygemm"
    if not on_cpu:
        return quantization.Int4WeightOnlyConfig(
            group_size=scheme.group_size,
            int4_packing_format="tile_packed_to_4d",
            int4_choose_qparams_algorithm=algorithm,
        )
    # A prototype may move or disappear: import it only where it is used.
    from torchao.prototype.quantization.int4 import inference_workflow

    return inference_workflow.PrototypeInt4WeightOnlyConfig(
        group_size=scheme.group_size, int4_choose_qparams_algorithm=algorithm
    )


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Silence torchao's warnings about libraries for other hardware during its import."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
