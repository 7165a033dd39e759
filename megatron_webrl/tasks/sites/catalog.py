"""All environments of the sites by name, and their goals."""

from __future__ import annotations

import random
from functools import lru_cache

from megatron_webrl.tasks.sites import calendar_tasks, forms_tasks, forum_tasks, shop_tasks, wiki_tasks
from megatron_webrl.tasks.sites.app import App
from megatron_webrl.tasks.sites.goal import Environment, Goal

ENVIRONMENTS: dict[str, Environment] = {
    **shop_tasks.ENVIRONMENTS,
    **forum_tasks.ENVIRONMENTS,
    **calendar_tasks.ENVIRONMENTS,
    **wiki_tasks.ENVIRONMENTS,
    **forms_tasks.ENVIRONMENTS,
}

SITE_APPS: dict[str, type[App]] = {entry.app_class.name: entry.app_class for entry in ENVIRONMENTS.values()}


@lru_cache(maxsize=256)  # the episodes of a group share one
def get_goal(environment: str, seed: int) -> Goal:
    """The goal of an environment and a seed; equal on every machine. Raises KeyError."""
    return ENVIRONMENTS[environment].make_goal(random.Random(f"{environment}/{seed}"))
