"""Settings of tasks: source, sampler, simulated latency."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_webrl.config.setting import setting

PAGE_SOURCES = ("miniwob", "sites")  # with environments and pages of their own; other sources draw rows
FILE_SOURCES = ("webgym", "online_mind2web", "webvoyager", "file")  # formats of task files; file: by tasks.fields alone


@dataclass
class LatencyConfig:
    median_seconds: float = setting(0.0, "Median response time of local pages; 0: no delay.", low=0)
    sigma: float = setting(
        1.0, "Heaviness of the tail: standard deviation of the logarithm of the response time.", low=0
    )


@dataclass
class SamplerConfig:
    name: str = setting(
        "uniform",
        "How environments, or the tasks of a file, are drawn: uniformly, by given weights, by what their successes "
        "and failures leave to learn, or by how near their pass rate is to a target.",
        choices=("uniform", "ratio", "curriculum", "near_target"),
    )
    weights: dict[str, float] = setting(
        {}, "ratio: relative frequency of environments, such as {click-test: 2}; those left out: 1."
    )
    difficulty_weights: dict[str, float] = setting(
        {},
        "ratio: relative frequency of difficulties, such as {easy: 2, medium: 5, hard: 3}, shared equally"
        " by their environments or tasks; those left out: 1.",
    )
    target: float = setting(0.45, "Pass rate that near_target aims at.", low=0, high=1)
    per: str = setting(
        "task",
        "Tasks from files: the unit that is drawn and whose pass rate is estimated; a task is then drawn from it.",
        choices=("task", "website", "difficulty"),
    )


@dataclass
class GrowingStepsConfig:
    """The limit at version v, with n = min(v // interval, N) and N = cap_step // interval, is
    initial + int(n * (max - initial) / N)."""

    interval: int = setting(0, "Updates between increases of the step limit of training; 0: it does not grow.", low=0)
    initial: int = setting(10, "First step limit.", low=1)
    max: int = setting(30, "Last step limit.", low=1)
    cap_step: int = setting(100, "Update from which on the last step limit holds.", low=1)


@dataclass
class TasksConfig:
    source: str = setting(
        "miniwob",
        "Where tasks come from: miniwob, sites, a format of task files (webgym, online_mind2web, webvoyager, file), "
        "or the import path of a source, such as my_package.my_source:Source.",
    )
    environments: list[str] = setting(
        ["click-test"], "Environments of the source, drawn by tasks.sampler; task files have none."
    )
    train_file: str = setting(
        "", "Tasks of training: a JSONL or Parquet file, or a datasets folder or hub name with its split (NAME:SPLIT)."
    )
    test_file: str = setting("", "Tasks of evaluation, in order; of the same kinds.")
    fields: dict[str, str] = setting(
        {},
        "Field of the task files for fields of a task (id, instruction, website, benchmark, domain, subdomain, "
        "difficulty, facts, answer), such as {instruction: goal}; replaces the format's own.",
    )
    allow_shared_websites: bool = setting(False, "Permit websites that are in both task files.")
    block_hours: float = setting(
        12.0, "Hours for which training draws no tasks of a website that blocked the agent; 0: none.", low=0
    )
    max_steps: int = setting(10, "Step limit of an episode.", low=1)
    max_steps_by_difficulty: dict[str, int] = setting(
        {}, "Step limits that differ by difficulty, such as {easy: 10, medium: 20, hard: 30}."
    )
    evaluation_max_steps_by_difficulty: dict[str, int] = setting(
        {}, "Step limits of evaluation; difficulties left out are as in training."
    )
    growing_steps: GrowingStepsConfig = field(default_factory=GrowingStepsConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    offline_websites: bool = setting(
        False,
        "Serve offline websites, hosts such as shop-17.localhost, for tasks that name a URL; read by browser servers.",
    )
    latency: LatencyConfig = field(default_factory=LatencyConfig)

    @property
    def from_files(self) -> bool:
        """Whether tasks come from task files."""
        return self.source in FILE_SOURCES

    @property
    def from_import_path(self) -> bool:
        """Whether tasks.source is an import path, such as my_package.my_source:Source."""
        return ":" in self.source
