"""Planted defects, at least one for every check of safeops.testing: {check: [(defect's name, subject, words that the
check's failure must contain)]}."""

from tests.testing.broken import execution, masks, values
from tests.testing.broken.plant import DEFECTS

__all__ = ["DEFECTS", "execution", "masks", "values"]
