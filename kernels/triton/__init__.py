"""Triton twins of the references, one file an operation under the same name, registered for `triton`.

On CUDA the table prefers what is registered here and falls back to the reference, operation by operation.
"""
