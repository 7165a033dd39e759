"""The teacher of an on-policy distillation, which scores finished episodes."""
