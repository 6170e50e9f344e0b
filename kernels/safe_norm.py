"""safe_norm: masked_norm by another name."""

from .masked_norm import masked_norm as safe_norm  # noqa: F401
from .masked_norm import masked_norm_backward as safe_norm_backward  # noqa: F401
