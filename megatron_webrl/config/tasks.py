"""Settings of tasks: source, sampler, simulated latency."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_webrl.config.setting import setting


@dataclass
class LatencyConfig:
    median_seconds: float = setting(0.0, "Median response time of the sites; 0: no delay.", low=0)
    sigma: float = setting(
        1.0, "Heaviness of the tail: standard deviation of the logarithm of the response time.", low=0
    )


@dataclass
class SamplerConfig:
    name: str = setting(
        "uniform",
        "How environments are drawn: uniformly, by given weights, by what their successes and failures "
        "leave to learn, or by how near their pass rate is to a target.",
        choices=("uniform", "ratio", "curriculum", "near_target"),
    )
    weights: dict[str, float] = setting(
        {}, "ratio: relative frequency of environments, such as {click-test: 2}; those left out: 1."
    )
    difficulty_weights: dict[str, float] = setting(
        {},
        "ratio: relative frequency of difficulties, such as {easy: 2, medium: 5, hard: 3}, shared equally"
        " by their environments; those left out: 1.",
    )
    target: float = setting(0.45, "Pass rate that near_target aims at.", low=0, high=1)


@dataclass
class TasksConfig:
    source: str = setting("miniwob", "Where tasks come from.", choices=("miniwob", "sites"))
    environments: list[str] = setting(["click-test"], "Environments of the source, drawn by tasks.sampler.")
    max_steps: int = setting(10, "Step limit of an episode.", low=1)
    max_steps_by_difficulty: dict[str, int] = setting(
        {}, "Step limits that differ by difficulty, such as {easy: 10, medium: 20, hard: 30}."
    )
    evaluation_max_steps_by_difficulty: dict[str, int] = setting(
        {}, "Step limits of evaluation; difficulties left out are as in training."
    )
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
