"""The PyTorch backend of logitless: tile by tile, on any device, in any float dtype."""

from importlib.metadata import version

from logitless_torch.backend import TorchBackend
from logitless_torch.reference_names import FusedLinearForPPO

__version__ = version("logitless-torch")

__all__ = ["FusedLinearForPPO", "TorchBackend"]
