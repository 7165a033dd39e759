"""Settings of tasks: source, sampler, simulated latency. The class of a section tasks depends on tasks.source."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_webrl.config.setting import ConfigError, Variants, check_sections, is_import_path, setting
from megatron_webrl.types import DIFFICULTIES
from megatron_webrl.util.text import close_matches, first_line

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
        {},
        "Relative frequency of environments, such as {click-test: 2}, or of difficulties, such as {easy: 2, medium: 5, "
        "hard: 3}, shared equally by their environments or tasks; those left out: 1.",
        only_with=("name", "ratio"),
    )
    target: float = setting(
        0.45, "Pass rate that near_target aims at.", low=0, high=1, only_with=("name", "near_target")
    )
    pass_rate_margin: float = setting(
        0.0,
        "Environments, or units of tasks.sampler.per, whose estimated pass rate is below this or above 1 less this are "
        "left out of nine tenths of the draws; 0: none.",
        low=0,
        high=0.49,
    )
    per: str = setting(
        "task",
        "Tasks from files: the unit that is drawn and whose pass rate is estimated; a task is then drawn from it.",
        choices=("task", "website", "difficulty"),
    )

    def check(self) -> None:
        for name, weight in self.weights.items():
            if not (weight >= 0 and math.isfinite(weight)):
                raise ConfigError(f"tasks.sampler.weights.{name}={weight} must be a number of at least 0")
        if self.name == "near_target" and not self.pass_rate_margin <= self.target <= 1 - self.pass_rate_margin:
            raise ConfigError(
                f"tasks.sampler.target={self.target} is outside of the pass rates that tasks.sampler.pass_rate_margin="
                f"{self.pass_rate_margin} leaves; lower the margin"
            )
        if self.name == "ratio" and not self.weights:
            raise ConfigError(
                "tasks.sampler.name=ratio needs tasks.sampler.weights, of environments or of difficulties"
            )

    @property
    def adapts(self) -> bool:
        """Whether draws follow the policy's pass rates; otherwise their probabilities are constant."""
        return self.name in ("curriculum", "near_target") or self.pass_rate_margin > 0

    def admits(self, pass_rate: float) -> bool:
        """Whether an estimated pass rate is within pass_rate_margin."""
        return self.pass_rate_margin <= pass_rate <= 1 - self.pass_rate_margin

    @property
    def by_difficulty(self) -> bool:
        """Whether the weights are those of difficulties."""
        return self.weights.keys() <= set(DIFFICULTIES)


@dataclass
class GrowingStepsConfig:
    """The limit at version v, with n = min(v // interval, N) and N = cap_step // interval, is
    initial + int(n * (max - initial) / N)."""

    interval: int = setting(0, "Updates between increases of the step limit of training; 0: it does not grow.", low=0)
    initial: int = setting(10, "First step limit.", low=1, only_with="interval")
    max: int = setting(30, "Last step limit.", low=1, only_with="interval")
    cap_step: int = setting(100, "Update from which on the last step limit holds.", low=1, only_with="interval")

    def check(self) -> None:
        if self.interval and self.cap_step < self.interval:
            raise ConfigError(
                f"tasks.growing_steps.cap_step={self.cap_step} is below tasks.growing_steps.interval="
                f"{self.interval}: the limit would never grow; raise it"
            )
        if self.max < self.initial:
            raise ConfigError(
                f"tasks.growing_steps.max={self.max} is below tasks.growing_steps.initial={self.initial}; raise it"
            )


@dataclass
class TasksConfig:
    """Settings of every source; the classes below add those of one kind."""

    source: str = setting(
        "miniwob",
        "Where tasks come from: miniwob, sites, a format of task files (webgym, online_mind2web, webvoyager, file), "
        "several of these (mix), or the import path of a source, such as my_package.my_source:Source.",
        own=True,
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
        return is_import_path(self.source)

    @property
    def evaluators(self) -> dict[str, list[str]]:
        """Those of judge.evaluators that decide the episodes of a source of tasks.mix, by its name; else all do."""
        return {}

    def check(self) -> None:
        for key in ("max_steps_by_difficulty", "evaluation_max_steps_by_difficulty"):
            limits = getattr(self, key)
            check_names(f"tasks.{key}", limits, DIFFICULTIES, ", ".join(DIFFICULTIES))
            for difficulty, steps in limits.items():
                if steps < 1:
                    raise ConfigError(f"tasks.{key}.{difficulty}={steps} must be at least 1")
        if self.growing_steps.interval and not self.from_import_path and self.max_steps != TasksConfig().max_steps:
            raise ConfigError(
                f"tasks.max_steps={self.max_steps} has no effect with tasks.growing_steps.interval="
                f"{self.growing_steps.interval}, whose limits replace it; leave it out"
            )


@dataclass
class PageTasksConfig(TasksConfig):
    """miniwob and sites: environments with pages of their own."""

    environments: list[str] = setting(["click-test"], "Environments of the source, drawn by tasks.sampler.")

    def check(self) -> None:
        super().check()
        sampler = self.sampler
        if not self.environments:
            raise ConfigError("tasks.environments is empty; name at least one environment")
        if sampler.by_difficulty:
            return
        check_names("tasks.sampler.weights", sampler.weights, self.environments, "tasks.environments, or difficulties")
        if not any(sampler.weights.get(name, 1.0) for name in self.environments):
            raise ConfigError("tasks.sampler.weights is 0 for every one of tasks.environments; raise one")


@dataclass
class FileTasksConfig(TasksConfig):
    """Task files."""

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

    def check(self) -> None:
        super().check()
        if self.from_import_path:
            return
        check_names("tasks.sampler.weights", self.sampler.weights, DIFFICULTIES, ", ".join(DIFFICULTIES))


@dataclass
class OwnTasksConfig(FileTasksConfig):
    """A source of the user's own: it reads the settings that it likes."""

    environments: list[str] = setting([], "Environments of the source, drawn by tasks.sampler.")


@dataclass
class TaskPart:
    """A source of tasks.mix: what its entry has beside the settings of a section tasks, and these."""

    name: str = setting("", "Name of the source in metrics and evaluations.")
    weight: float = setting(1.0, "Share of the tickets that draw its tasks, relative to the others.", above=0)
    evaluators: list[str] = setting([], "Those of judge.evaluators that decide its episodes; empty: all.")
    tasks: Any = None


@dataclass
class MixTasksConfig(TasksConfig):
    """Several sources."""

    mix: list[dict[str, Any]] = setting(
        [],
        "Sources that share the tickets: each has the settings of a section tasks (what it leaves out is as in tasks), "
        "and may have a name, a weight (1), and evaluators, those of judge.evaluators that decide its episodes.",
    )

    @property
    def parts(self) -> list[TaskPart]:
        """The sources, with all their settings. Raises ConfigError."""
        return [self._part(number, dict(entry)) for number, entry in enumerate(self.mix)]

    @property
    def evaluators(self) -> dict[str, list[str]]:
        return {part.name: part.evaluators for part in self.parts if part.evaluators}

    def check(self) -> None:
        super().check()
        parts = self.parts
        if len(parts) < 2:
            raise ConfigError("tasks.source=mix needs at least two sources in tasks.mix")
        seen = dict[str, str]()
        for number, part in enumerate(parts):
            if part.name in (other.name for other in parts[:number]):
                raise ConfigError(f"tasks.mix: two sources have the name {part.name}; give each a name of its own")
            for name in part.tasks.environments if isinstance(part.tasks, PageTasksConfig) else ():
                if (other := seen.setdefault(name, part.name)) != part.name:
                    raise ConfigError(f"tasks.mix: {name} is an environment of {other} and of {part.name}; of one only")

    def _part(self, number: int, entry: dict[str, Any]) -> TaskPart:
        key = f"tasks.mix[{number}]"
        source = entry.get("source")
        if source is None:
            raise ConfigError(f"{key} names no source; one of {', '.join(SOURCES.classes)}")
        if source == self.source:
            raise ConfigError(f"{key}.source={source}: a mix has no mix")
        common = {spec.name: getattr(self, spec.name) for spec in fields(TasksConfig)} | {"source": source}
        for name in ("latency", "offline_websites"):
            if name in entry:
                raise ConfigError(f"{key}.{name} holds for all sources; set tasks.{name}")
        beside = {name: entry.pop(name) for name in ("name", "weight", "evaluators") if name in entry}
        settings = SOURCES.choose(key, source)(**common)
        try:
            part, tasks = (
                OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(usual), given))
                for usual, given in ((TaskPart, beside), (settings, entry))
            )
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}.{error.full_key or error.key}: {first_line(error)}") from error
        assert isinstance(part, TaskPart)
        part.name = part.name or str(source)
        if not re.fullmatch(r"[\w-]+", part.name):
            raise ConfigError(f"{key}.name={part.name!r} is not made of letters, digits, - and _; give it another name")
        try:
            for section in (part, tasks):
                check_sections(section, f"{key}.")
        except ConfigError as error:
            message = str(error)
            raise ConfigError(message if key in message else message.replace("tasks.", f"{key}.", 1)) from error
        part.tasks = tasks
        return part


SOURCES = Variants(
    "source",
    dict.fromkeys(PAGE_SOURCES, PageTasksConfig)
    | dict.fromkeys(FILE_SOURCES, FileTasksConfig)
    | {"mix": MixTasksConfig},
    OwnTasksConfig,
)
"""Settings of each source, by tasks.source."""


def task_parts(tasks: TasksConfig) -> dict[str, TasksConfig]:
    """The settings of each source by its name in tasks.mix; a source alone has the name "". Raises ConfigError."""
    return {part.name: part.tasks for part in tasks.parts} if isinstance(tasks, MixTasksConfig) else {"": tasks}


def tasks_config(source: str = "miniwob", **settings: Any) -> Any:
    """Settings of one source; those that are left out have their defaults. Raises ConfigError for an unknown source."""
    return SOURCES.choose("tasks", source)(source=source, **settings)


def check_names(key: str, names: Mapping[str, object], known: Sequence[str], allowed: str) -> None:
    """Raise ConfigError for the first name that is not known."""
    for name in names:
        if name not in known:
            raise ConfigError(f"{key}: {name!r} is not one of {allowed}{close_matches(name, known)}")
