"""Triton kernels of the cycle on CUDA, and their launchers; imported only if Triton is there."""
