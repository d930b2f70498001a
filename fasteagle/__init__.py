"""fasteagle: lossless speculative decoding of Llama-family models at batch size 1."""

__version__ = "0.1.0"
