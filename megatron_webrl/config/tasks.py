"""Settings of tasks: source, sampler, simulated latency."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_webrl.config.setting import setting


@dataclass
class LatencyConfig:
    median_seconds: float = setting(0.0, "Median time to an answer of the sites, seconds; 0: none.", low=0)
    sigma: float = setting(1.0, "Heaviness of the tail: standard deviation of the logarithm of that time.", low=0)


@dataclass
class SamplerConfig:
    name: str = setting(
        "uniform",
        "How often each environment is drawn: equally often, by given weights, by how much there is to learn from its "
        "successes and failures, or by how near its pass rate is to a target.",
        choices=("uniform", "ratio", "curriculum", "near_target"),
    )
    weights: dict[str, float] = setting(
        {}, "ratio: how often environments are drawn relative to others, such as {click-test: 2}; those left out: 1."
    )
    difficulty_weights: dict[str, float] = setting(
        {},
        "ratio: tickets of a difficulty relative to others, such as {easy: 2, medium: 5, hard: 3}, shared equally by "
        "its environments; those left out: 1.",
    )
    target: float = setting(0.45, "Pass rate that near_target looks for.", low=0, high=1)


@dataclass
class TasksConfig:
    source: str = setting("miniwob", "Where tasks come from.", choices=("miniwob", "sites"))
    environments: list[str] = setting(["click-test"], "Environments of the source; tasks.sampler draws them.")
    max_steps: int = setting(10, "Steps of one episode.", low=1)
    max_steps_by_difficulty: dict[str, int] = setting(
        {}, "Steps of one episode where they differ, such as {easy: 10, medium: 20, hard: 30}."
    )
    evaluation_max_steps_by_difficulty: dict[str, int] = setting(
        {}, "The same for tasks of evaluation; those left out are as in training."
    )
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
