"""The Triton backend of logitless: fused kernels for NVIDIA GPUs, and Triton's interpreter on a CPU for tests."""

from importlib.metadata import version

from logitless_triton.backend import TritonBackend
from logitless_triton.reference_names import linear_cross_entropy

__version__ = version("logitless-triton")

__all__ = ["TritonBackend", "linear_cross_entropy"]
