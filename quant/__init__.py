"""Weight formats, their linears and their kernels."""
