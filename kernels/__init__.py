"""Triton kernels for CUDA tensors and the plain functions that launch them: one folder per family of ops.

engine/ holds what the families share, and imports no family. Most files of a family are named after a public op that
they compute. A launcher is named after the raw op (`_<op>`, `_<op>_backward`) whose arguments it takes.
Importing this package imports neither torch nor triton: the modules of the launchers do.
"""
