"""CPU paths of operations whose reference is too slow there, registered for `cpu`; same contracts as the references."""

from kernels.cpu import linear, rms_norm

__all__ = ["linear", "rms_norm"]
