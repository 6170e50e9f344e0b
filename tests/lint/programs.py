"""Makes the source of a file from a test's code: imports, and a function called loss with the code as its body."""

import textwrap

from safeops_lint.rules import RULES

HEADER = """\
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


"""
EVERY = list(RULES.values())  # rules that are named also report possible findings, not only likely ones


def program(arguments, body):
    return f"{HEADER}def loss({arguments}):\n{textwrap.indent(body, '    ')}\n"
