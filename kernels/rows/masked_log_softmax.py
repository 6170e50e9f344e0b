"""masked_log_softmax: masked_softmax with log=True."""

from .masked_softmax import masked_softmax as masked_log_softmax  # noqa: F401
from .masked_softmax import masked_softmax_backward as masked_log_softmax_backward  # noqa: F401
