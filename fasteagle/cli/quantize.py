"""Run `fasteagle quantize`: write a model's quantized weights and tokenizer into a folder."""

from __future__ import annotations

from pathlib import Path

import torch

from fasteagle.device import pick_device
from fasteagle.errors import FasteagleError, note
from fasteagle.loading.open import open_model
from fasteagle.loading.quantize import scheme_for, write_folder
from fasteagle.options import RuntimeOptions
from fasteagle.paths import atomic_dir, require_place


def run_quantize(model: str, options: RuntimeOptions, out: Path) -> None:
    """Write the quantized model into the folder `out`, which `chat` takes as `--model`."""
    if options.quant is None:
        raise FasteagleError("quantize needs a precision: give --int4, --int8 or --precision NAME")
    if options.backend == "torchao":
        raise FasteagleError("quantize writes fasteagle's own formats: leave -torchao out")
    for part in (options.dtype, options.cpu_kernels):
        if part != "auto":
            raise FasteagleError(f"quantize writes weights only: leave -{part} out")
    if options.lm_head != RuntimeOptions.lm_head:
        raise FasteagleError(
            "the LM head is written in 16 bits, and its precision is chosen when the model runs: "
            f"leave -lm{options.head_bits} out"
        )
    require_place(out)
    if options.threads:
        torch.set_num_threads(options.threads)
    opened = open_model(model)
    checkpoint = opened.checkpoint
    if checkpoint.scheme is not None:
        raise FasteagleError(
            f"{model} is quantized already ({checkpoint.scheme.name}): give an unquantized model"
        )
    scheme = scheme_for(checkpoint, options.quant, options.head_bits)
    device = pick_device(options.device)
    with atomic_dir(out) as temporary:
        write_folder(temporary, checkpoint, scheme, device, note)
        opened.tokenizer.save(temporary)
    size = sum(file.stat().st_size for file in out.iterdir())
    note(f"{scheme.name} weights of {opened.name} written to {out} ({size / 1e6:.0f} MB)")
