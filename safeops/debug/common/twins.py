"""torch's losses that safeops has too: from its records, and two that have none."""

import torch.nn.functional as F

from safeops.core.op import registry

TWINS = {op.name: op for op in registry.values() if op.module and hasattr(F, op.name)}
# Those that are called with a prediction and a target, or with distances: not the one that makes the logits itself.
LOSSES = frozenset(name for name, op in TWINS.items() if getattr(op, "shards", None) != "vocabulary")
LOSSES |= {"triplet_margin_with_distance_loss"}
OF_CLASSES = frozenset(name for name, op in TWINS.items() if getattr(op, "shards", None) == "rows")
