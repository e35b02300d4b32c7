"""CPU paths of operations whose reference is too slow there, registered for `cpu`; same contracts as the references."""

from kernels.cpu import linear, logprobs, lora, paged_attention, rms_norm, sampling, unembed

__all__ = ["linear", "logprobs", "lora", "paged_attention", "rms_norm", "sampling", "unembed"]
