"""The losses that torch.nn.functional and safeops both have, from safeops' op records."""

import torch.nn.functional as F

from safeops.core.op import registry

TWINS = {op.name: op for op in registry.values() if op.module and hasattr(F, op.name)}
# Losses that take a prediction and a target, or distances; not linear_cross_entropy, which computes its logits itself.
LOSSES = frozenset(name for name, op in TWINS.items() if getattr(op, "shards", None) != "vocabulary")
LOSSES |= {"triplet_margin_with_distance_loss"}
OF_CLASSES = frozenset(name for name, op in TWINS.items() if getattr(op, "shards", None) == "rows")
