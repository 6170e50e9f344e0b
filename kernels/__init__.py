"""Triton kernels for CUDA tensors and the plain functions that launch them: one folder per family of ops.

engine/ is what the families share, and uses none of them; a family uses no other. Each file is named after a public op
that it computes, and its launchers after the raw ops (`_<op>`, `_<op>_backward`), whose arguments they take.

Importing this package imports neither torch nor triton: the modules of the launchers do.
"""
