"""Weight formats by name, and what they cost in bytes."""

from __future__ import annotations

import dataclasses

from fasteagle.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How block linears and the LM head are stored; embeddings and norms stay in 16 bits."""

    name: str
    linear_bytes: float  # per weight, scales and zeros included
    head_bytes: float

    def model_bytes(self, config: ModelConfig) -> int:
        """Weight bytes of a model; a tied embedding is stored apart from a head below 16 bits."""
        table = config.vocab_size * config.dim
        embedding = 0 if config.tie_embeddings and self.head_bytes == 2 else 2 * table
        return int(config.linear_params * self.linear_bytes + table * self.head_bytes + embedding)


def grouped_bytes(bits: int, group_size: int) -> float:
    """Bytes per weight with an fp16 scale and an fp16 zero for every group."""
    return bits / 8 + 4 / group_size


BF16 = Scheme("bf16", 2.0, 2.0)
INT8 = Scheme("int8", 1.0, 1.0)  # per row: one scale in thousands of weights
INT4_G128 = Scheme("int4-g128", grouped_bytes(4, 128), 1.0)
INT4_G32 = Scheme("int4-g32", grouped_bytes(4, 32), 1.0)


def int4_for(config: ModelConfig) -> Scheme:
    """The int4 scheme that a model's widths allow: groups of 128 where they divide, else 32."""
    widths = (config.dim, config.n_head * config.head_dim, config.ffn_dim)
    return INT4_G128 if all(width % 128 == 0 for width in widths) else INT4_G32
