"""The configuration of whole jobs in tests: a tiny model, few and short episodes."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {
    "trainer": {
        "updates": 2,
        "groups_per_update": 2,
        "tokens_per_microbatch": 4096,
        # A policy with random weights never succeeds: its groups are all alike, and still must flow.
        "zero_variance_groups": "keep",
        "optimizer": {"learning_rate": 1e-4},
    },
    "rollout": {
        "group_size": 2,
        "groups_in_flight": 2,
        "max_staleness": 1,
        "max_new_tokens": 16,
        "max_model_len": 1024,
        "kv_cache_mib": 32,
        "context": {"response_format": "bare", "compact": True},
    },
    "tasks": {"environments": ["click-test", "focus-text"], "max_steps": 2},
    "browser": {"width": 160, "height": 224, "screenshot": "png"},
    "ring": {"capacity_mib": 64},
}
