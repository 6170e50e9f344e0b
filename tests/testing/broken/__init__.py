"""Planted defects, one or more for every check of the harness: {check: [(what is wrong, subject, failure's words)]}."""

from tests.testing.broken import execution, masks, values
from tests.testing.broken.plant import DEFECTS

__all__ = ["DEFECTS", "execution", "masks", "values"]
