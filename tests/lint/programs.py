"""A test's line of code as a file: imports, and a function called loss."""

import textwrap

from safeops_lint.rules import RULES

HEADER = """\
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


"""
EVERY = list(RULES.values())  # given by name: what is possible, too, and not likely alone


def program(arguments, body):
    return f"{HEADER}def loss({arguments}):\n{textwrap.indent(body, '    ')}\n"
