"""Triton kernels of the cycle on CUDA, and what launches them; imported only where Triton is."""
