"""What a person is told where a device's memory is too small: which setting fits instead."""

from __future__ import annotations

import dataclasses

import torch

from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.device import available_bytes
from fasteagle.errors import FasteagleError
from fasteagle.loading.memory import SHORTEST, Setting, needed_bytes, smaller_fit
from fasteagle.quant.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Asked:
    """A model as it shall run on a device, with `context` tokens; `scheme` None: dense."""

    config: ModelConfig
    scheme: Scheme | None
    kv: str
    context: int
    device: torch.device

    def fitting(self, n_bytes: int, head: HeadConfig | None) -> str:
        """In words, what fits in `n_bytes`, with a draft head where there is one."""
        return smaller_fit(self.config, n_bytes, self.scheme, self.kv, self.context, head)

    def not_loaded(self, head: HeadConfig | None) -> FasteagleError:
        """Memory was short for the weights or the KV cache, which are gone again."""
        free = available_bytes(self.device) or 0
        return short_of_memory("loading", self.device, self.fitting(free, head))

    def advice(self, head: HeadConfig | None) -> str:
        """What would fit on the card of a model that is loaded, in what it has and what is free."""
        ours = torch.cuda.memory_reserved(self.device)
        return self.fitting(ours + (available_bytes(self.device) or 0), head)


def short_of_memory(doing: str, device: torch.device, fix: str) -> FasteagleError:
    """Memory ran out while `doing`; says what is free and how to go on."""
    free = (available_bytes(device) or 0) / 2**30
    return FasteagleError(f"out of memory while {doing}, {free:.1f} GiB free on {device}: {fix}")


def not_quantized(config: ModelConfig, scheme: Scheme, device: torch.device) -> FasteagleError:
    """Memory was short for one tensor and what its values are chosen with.

    Where the quantized model would fit, the CPU can quantize it.
    """
    free = available_bytes(device) or 0
    least = Setting(scheme, "auto", min(SHORTEST, config.max_seq_len))
    if device.type != "cpu" and needed_bytes(config, least) <= free:
        fix = f"quantize on the CPU: fasteagle quantize --precision {scheme.name} --device cpu"
    else:
        fix = smaller_fit(config, free, scheme, least.kv, least.context)
    return short_of_memory(f"quantizing to {scheme.name}", device, fix)
