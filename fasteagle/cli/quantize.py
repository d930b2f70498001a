"""What `fasteagle quantize` does: the weights and the tokenizer of a model into a folder."""

from __future__ import annotations

import functools
from pathlib import Path

from fasteagle.device import pick_device
from fasteagle.errors import FasteagleError, note
from fasteagle.loading.open import open_model
from fasteagle.loading.quantize import scheme_asked, write_folder
from fasteagle.options import RuntimeOptions
from fasteagle.paths import atomic_dir, require_writable


def run_quantize(model: str, options: RuntimeOptions, out: Path, data: Path | None) -> None:
    """Write `out`, which `chat` takes as `--model`; GPTQ calibrates on `data` if given."""
    if options.quant is None:
        raise FasteagleError("quantize to what? give --int4, --int8 or --quant NAME")
    if out.exists() and any(out.iterdir()):
        raise FasteagleError(f"{out} is there already and not empty: give another -o")
    if not out.exists():
        require_writable(out)
    opened = open_model(model)
    checkpoint = opened.checkpoint
    if checkpoint.scheme is not None:
        raise FasteagleError(f"{model} is quantized already ({checkpoint.scheme.name})")
    scheme = scheme_asked(checkpoint, options.quant, options.head_bits)
    device = pick_device(options.device)
    if out.exists():
        out.rmdir()
    with atomic_dir(out) as temporary:
        texts = functools.partial(opened.gptq_texts, note, data)
        write_folder(temporary, checkpoint, scheme, texts, device)
        opened.tokenizer.save(temporary)
    size = sum(file.stat().st_size for file in out.iterdir())
    note(f"{scheme.name} weights of {opened.name} written to {out} ({size / 1e6:.0f} MB)")
