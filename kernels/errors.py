"""What kernels refuse, and how they say so."""

from __future__ import annotations


class KernelInputError(ValueError):
    """An operation was given what its kernel does not serve: a shape, dtype, stride, device or head size.

    It is raised before anything is launched; the message names the operation and the argument.
    """


class KernelsUnavailableError(RuntimeError):
    """A backend was asked for that this process cannot use; the message says why."""
