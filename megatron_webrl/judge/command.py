"""`webrl judge`: judge stored episodes again, and compare verdicts with labels."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from megatron_webrl.config.schema import Config, RunConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.evaluation import ANSWER, STEPS_EXHAUSTED
from megatron_webrl.ring.record import count_records, decode_trajectory, read_record_file
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.types import TRAINABLE_OUTCOMES, Trajectory

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_webrl.config.judge import JudgeConfig
    from megatron_webrl.judge.evaluation import JudgedEpisodes
    from megatron_webrl.judge.verdict_file import VerdictFile


RECORDS = "*.records"


@dataclass(frozen=True)
class StoredEpisodes:
    """Record files, and the folder of the run that wrote them, if it was one."""

    files: tuple[Path, ...]
    run: Path | None = None

    @classmethod
    def find(cls, name: str) -> StoredEpisodes:
        """The episodes of a record file, a folder of them, a run's folder, or a run in runs/. Raises ConfigError."""
        for path in (Path(name), Path(RunConfig().directory) / name):
            if path.is_file():
                return cls((path,))
            if (path / "config.yaml").is_file():
                records = Config(run=RunConfig(name=path.name, directory=str(path.parent))).records_folder
                if not list(records.glob(RECORDS)):
                    raise ConfigError(f"{path} has stored no episodes in {records}; set tracking.keep_records=true")
                return cls(tuple(sorted(records.glob(RECORDS))), path)
            if files := sorted(path.glob(RECORDS)):
                return cls(tuple(files))
        raise ConfigError(f"{name} is no record file, folder of record files, or run")

    def count(self) -> int:
        """The number of episodes. Raises ConfigError for a damaged file."""
        try:
            return sum(map(count_records, self.files))
        except (RecordError, OSError) as error:
            raise ConfigError(str(error)) from error

    def read(self) -> Iterator[tuple[str, Trajectory]]:
        """A key of each episode, unique among the files, and the episode. Raises ConfigError for a damaged file."""
        for path in self.files:
            try:
                for number, record in enumerate(read_record_file(path)):
                    yield f"{path.name}:{number}", with_end_reason(decode_trajectory(record, copy=True))
            except (RecordError, OSError) as error:
                raise ConfigError(f"{path}: {error}") from error


def with_end_reason(trajectory: Trajectory) -> Trajectory:
    """The episode; its end is inferred from its outcome where it was not stored, as in demonstrations."""
    if trajectory.end_reason:
        return trajectory
    end = ANSWER if trajectory.answer is not None else STEPS_EXHAUSTED
    return replace(trajectory, end_reason=end if trajectory.outcome in TRAINABLE_OUTCOMES else trajectory.outcome)


SUCCESS, FAILURE = "success", "failure"
EpisodeKey = tuple[int, int]  # ticket, index


@dataclass(frozen=True)
class Agreement:
    """Verdicts against references, such as labels. Rates are None where nothing is counted."""

    counts: Mapping[tuple[str, str], int]  # reference, verdict

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Agreement:
        """`pairs`: reference and verdict of each episode."""
        return cls(dict(Counter(pairs)))

    @property
    def episodes(self) -> int:
        return sum(self.counts.values())

    @property
    def masked(self) -> int:
        """Episodes whose verdict is neither success nor failure."""
        return self._sum(lambda reference, verdict: verdict not in TRAINABLE_OUTCOMES)

    @property
    def accuracy(self) -> float | None:
        """Share of equal outcomes among the episodes where both are success or failure."""
        decided = self._sum(lambda r, v: r in TRAINABLE_OUTCOMES and v in TRAINABLE_OUTCOMES)
        return _share(self._sum(lambda r, v: r == v and r in TRAINABLE_OUTCOMES), decided)

    @property
    def false_success_rate(self) -> float | None:
        """Share of verdict success among the episodes whose reference is anything else."""
        wrong = self._sum(lambda r, v: r != SUCCESS and v == SUCCESS)
        return _share(wrong, self._sum(lambda r, v: r != SUCCESS))

    @property
    def false_failure_rate(self) -> float | None:
        """Share of verdict failure among the episodes whose reference is success."""
        return _share(self.counts.get((SUCCESS, FAILURE), 0), self._sum(lambda r, v: r == SUCCESS))

    def figures(self) -> dict[str, Any]:
        """All figures, for JSON."""
        rows: dict[str, dict[str, int]] = {}
        for (reference, verdict), count in sorted(self.counts.items()):
            rows.setdefault(reference, {})[verdict] = count
        return {
            "episodes": self.episodes, "masked": self.masked, "accuracy": self.accuracy,
            "false_success_rate": self.false_success_rate, "false_failure_rate": self.false_failure_rate,
            "confusion": rows,
        }  # fmt: skip

    def table(self, title: str) -> Table:
        """The confusion table: a row for each reference, a column for each verdict."""
        verdicts = _ordered({verdict for _, verdict in self.counts})
        table = Table(title=title, title_justify="left")
        table.add_column(title.split()[0].lower())
        for verdict in verdicts:
            table.add_column(f"judged\n{verdict}", justify="right")
        for reference in _ordered({reference for reference, _ in self.counts}):
            table.add_row(reference, *(str(self.counts.get((reference, verdict), 0)) for verdict in verdicts))
        return table

    def _sum(self, holds: Any) -> int:
        return sum(count for pair, count in self.counts.items() if holds(*pair))


def read_labels(path: Path) -> dict[EpisodeKey, str]:
    """Labels of a JSONL file, {"ticket": 3, "index": 0, "label": "success"} a line. Raises ConfigError."""
    labels: dict[EpisodeKey, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--labels={path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            ticket, index, label = found["ticket"], found["index"], found["label"]
        except (ValueError, KeyError, TypeError):
            ticket = index = label = None
        if type(ticket) is not int or type(index) is not int or not isinstance(label, str) or not label:
            raise ConfigError(
                f'{path}:{number}: expected {{"ticket": 3, "index": 0, "label": "success"}}, found {line[:80]}'
            )
        if labels.setdefault((ticket, index), label) != label:
            raise ConfigError(f"{path}:{number}: a second label for ticket {ticket}, index {index}")
    if not labels:
        raise ConfigError(f"--labels={path} has no labels")
    return labels


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ordered(names: set[str]) -> Sequence[str]:
    return sorted(names, key=lambda name: (name != SUCCESS, name != FAILURE, name))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


Line = dict[str, Any]


def add_judge(commands: Any) -> None:
    """Add `webrl judge` to the parser."""
    judge = commands.add_parser(
        "judge",
        help="judge stored episodes again; agreement, cost, confusion table",
        description="Judge the stored episodes of a run (tracking.keep_records) or of record files, and compare the "
        "verdicts with the stored outcomes or with labels. Verdicts are kept as they arrive: after Ctrl-C the same "
        "command continues. Exit code 1: the budget was spent before the end; 2: bad input; 130: Ctrl-C. "
        "docs/judge.md",
        epilog="example: webrl judge quickstart --config judge.yaml protocol=webjudge --json result.json",
    )
    judge.add_argument("of", metavar="RUN|TRAJECTORIES", help="a run, or a record file or folder of them")
    judge.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the section judge")
    judge.add_argument(
        "--config", nargs="+", default=[], metavar=("FILE", "key=value"),
        help="a section judge, or a configuration (default: that of the run), and settings that replace its own",
    )  # fmt: skip
    judge.add_argument(
        "--labels", type=Path, metavar="FILE", help='JSONL: {"ticket": 3, "index": 0, "label": "success"}'
    )
    judge.add_argument("--limit", type=int, metavar="N", help="judge the first N episodes only")
    judge.add_argument("--out", type=Path, metavar="FILE", help="where verdicts are kept (default: beside the records)")
    judge.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE, too")
    judge.set_defaults(run=_run)


def load_judge_config(path: Path | None, overrides: Sequence[str], of_run: bool = False) -> JudgeConfig:
    """The settings of a file with a section judge, or with the keys of one; evaluators default to the judge.

    `of_run`: the file is a run's, which holds every setting: the judge takes the place of the default, the page, too.
    Raises ConfigError.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from megatron_webrl.config.judge import JudgeConfig
    from megatron_webrl.config.load import merge_config
    from megatron_webrl.config.setting import check_sections
    from megatron_webrl.util.text import first_line

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}
        if not isinstance(found or {}, dict):
            raise ConfigError(f"{path} does not hold a mapping of settings")
        section = found.get("judge", {}) if "judge" in (found or {}) else found or {}
        if of_run and section.get("evaluators") == JudgeConfig().evaluators:
            section = {key: value for key, value in section.items() if key != "evaluators"}
        file = OmegaConf.create({"judge": {"evaluators": ["judge"], **section}})
    except OSError as error:
        raise ConfigError(f"--config={path} cannot be read: {error.strerror}") from error
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path or 'overrides'}: section judge: {first_line(error)}") from error
    own = [f"judge.{override.removeprefix('judge.')}" for override in overrides]
    settings = merge_config(file, own, str(path or "overrides")).judge
    check_sections(settings, "judge.")
    return settings


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.judge.verdict_file import VerdictFile, settings_digest

    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit={options.limit} must be at least 1")
    console = Console()
    stored = StoredEpisodes.find(options.of)
    file, *overrides = options.config or [str(stored.run / "config.yaml") if stored.run else ""]
    settings = load_judge_config(
        Path(file) if file else None, [*options.overrides, *overrides], of_run=not options.config
    )
    labels = read_labels(options.labels) if options.labels else None
    digest = settings_digest(settings)
    folder = stored.run / "judged" if stored.run else stored.files[0].parent / "judged"
    name = f"{settings.protocol if settings.uses_models else 'evaluators'}-{digest}.jsonl"
    with VerdictFile(options.out or folder / name, digest) as verdicts:
        try:
            found = _judge(stored, settings, verdicts, options.limit, console)
        except KeyboardInterrupt:
            console.print(
                f"interrupted; {len(verdicts.lines)} verdicts are in {verdicts.path}; run it again to continue"
            )
            return 130
        lines = [verdicts.lines[key] for key in found.keys]
    report = make_report(lines, found.masked, labels)
    console.print(f"verdicts: {verdicts.path}")
    _print_report(report, lines, labels, console)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if found.stopped:
        console.print(f"stopped: {found.stopped}; run it again to continue", style="bold red")
    return 1 if found.stopped else 0


def _judge(
    stored: StoredEpisodes, settings: JudgeConfig, verdicts: VerdictFile, limit: int | None, console: Console
) -> JudgedEpisodes:
    from megatron_webrl.judge.evaluation import judge_episodes
    from megatron_webrl.track.tables import progress_bar

    total = stored.count()
    with progress_bar(console) as bar:
        task = bar.add_task("episodes", total=min(total, limit or total))
        found = asyncio.run(
            judge_episodes(
                stored.read(), limit, settings, verdicts, lambda done: bar.update(task, completed=done)
            )
        )  # fmt: skip
        bar.update(task, total=len(found.keys))
    return found


def make_report(lines: Sequence[Line], masked: Counter[str], labels: dict[EpisodeKey, str] | None) -> dict[str, Any]:
    """All figures. `masked`: episodes that were not judged, by their end."""
    stages = [stage for line in lines for stage in line["stages"]]
    totals = {
        key: sum(line[key] for line in lines)
        for key in ("calls", "prompt_tokens", "response_tokens", "dollars", "seconds")
    }
    report = {
        "episodes": len(lines),
        "not_judged": dict(masked),
        "outcomes": dict(Counter(line["outcome"] for line in lines)),
        "verdicts": [
            {"evaluator": evaluator, "protocol": protocol, "prompts": prompts, "outcome": outcome, "episodes": count}
            for (evaluator, protocol, prompts, outcome), count in sorted(
                Counter((e["evaluator"], e["protocol"], e["prompts"], e["outcome"]) for e in lines).items()
            )
        ],
        "judge_errors": dict(Counter(line["reason"] for line in lines if line["outcome"] == "judge_error")),
        "faults": dict(Counter(name for stage in stages for name in stage["errors"])),
        "cost": totals,
        "cost_per_episode": {key: value / max(1, len(lines)) for key, value in totals.items()},
        "stored": stored_agreement(lines).figures(),
    }
    if labels is not None:
        report["labels"] = label_agreement(lines, labels).figures()
        report["labels_without_episode"] = len(set(labels) - {(line["ticket"], line["index"]) for line in lines})
    return report


def stored_agreement(lines: Sequence[Line]) -> Agreement:
    """Verdicts against the outcomes that were stored with the episodes."""

    return Agreement.of((line["stored"], line["outcome"]) for line in lines)


def label_agreement(lines: Sequence[Line], labels: dict[EpisodeKey, str]) -> Agreement:
    """Verdicts against labels, of the episodes that have one."""

    keyed = [((line["ticket"], line["index"]), line["outcome"]) for line in lines]
    return Agreement.of((labels[key], outcome) for key, outcome in keyed if key in labels)


def _print_report(
    report: dict[str, Any], lines: Sequence[Line], labels: dict[EpisodeKey, str] | None, console: Console
) -> None:
    from rich.table import Table

    table = Table(title="Verdicts", title_justify="left")
    for name in ("evaluator", "protocol", "prompts", "outcome", "episodes"):
        table.add_column(name, justify="right" if name == "episodes" else "left")
    for entry in report["verdicts"]:
        table.add_row(*(str(value) for value in entry.values()))
    console.print(table)
    agreements = [("Stored outcome", "agreement", stored_agreement(lines))]
    if labels is not None:
        agreements.append(("Label", "accuracy", label_agreement(lines, labels)))
    for title, share, agreement in agreements:
        console.print(agreement.table(title))
        console.print(
            f"{share} {percent(agreement.accuracy)} of episodes decided by both, false success "
            f"{percent(agreement.false_success_rate)}, false failure {percent(agreement.false_failure_rate)}, "
            f"{agreement.masked} of {agreement.episodes} masked"
        )
    cost = report["cost_per_episode"]
    console.print(
        f"cost per episode: {cost['calls']:.1f} calls, {cost['prompt_tokens']:.0f} prompt and "
        f"{cost['response_tokens']:.0f} response tokens, {cost['dollars']:.4f} dollars, {cost['seconds']:.1f} s"
    )
    for name, title in (("not_judged", "not judged, by end"), ("faults", "faults of the endpoint"),
                        ("judge_errors", "masked as judge_error")):  # fmt: skip
        if report[name]:
            counts = ", ".join(f"{key} {count}" for key, count in sorted(report[name].items()))
            console.print(f"{title}: {counts}")
    if report.get("labels_without_episode"):
        console.print(f"labels without an episode: {report['labels_without_episode']}")
