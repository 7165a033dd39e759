"""`webrl judge`: judge stored episodes again, and compare verdicts with labels."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.config.load import merge_config
from megatron_webrl.config.schema import Config, RunConfig
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.judge.budget import USAGE_FILE, BudgetSpent, LocalMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator
from megatron_webrl.judge.labels import FAILURE, JUDGE_FIGURES, SUCCESS, Labels, judge_scores, read_labels
from megatron_webrl.judge.verdict_file import VerdictFile, settings_digest
from megatron_webrl.ring.record import count_records, decode_trajectory, read_record_file
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.track.tables import progress_bar
from megatron_webrl.types import ANSWER, JUDGE_ERROR, REGULAR_ENDS, STEPS_EXHAUSTED, TRAINABLE_OUTCOMES, Trajectory
from megatron_webrl.util.concurrency import run_together
from megatron_webrl.util.text import first_line

RECORDS = "*.records"
EPISODES_AT_ONCE = 32  # in memory, with their screenshots
Line = dict[str, Any]


def add_judge(commands: Any) -> None:
    """Add `webrl judge` to the parser."""
    judge = commands.add_parser(
        "judge",
        help="judge stored episodes again; agreement, cost, confusion table",
        description="Judge the stored episodes of a run (tracking.keep_records) or of record files, and compare the "
        "verdicts with the stored outcomes or with labels of people. Verdicts are kept as they arrive: after Ctrl-C "
        "the same command continues. Exit code 1: the budget was spent before the end; 2: bad input; 130: Ctrl-C. "
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
        "--against", metavar="LABELS",
        help="compare with labels of people: a JSONL file, or Online-Mind2Web's human_label.json, with :AGENT",
    )  # fmt: skip
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

    try:
        found = (yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}) or {}
        if not isinstance(found, dict):
            raise ConfigError(f"{path} does not hold a mapping of settings")
        section = found.get("judge", found)
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
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit={options.limit} must be at least 1")
    console = Console()
    files, run = find_records(options.of)
    file, *overrides = options.config or [str(run / "config.yaml") if run else ""]
    settings = load_judge_config(
        Path(file) if file else None, [*options.overrides, *overrides], of_run=not options.config
    )
    labels = read_labels(options.against) if options.against else None
    digest = settings_digest(settings)
    name = f"{settings.protocol if settings.uses_models else 'evaluators'}-{digest}.jsonl"
    with VerdictFile(options.out or (run or files[0].parent) / "judged" / name, digest) as verdicts:
        try:
            with progress_bar(console) as bar:
                total = _count(files)
                task = bar.add_task("episodes", total=min(total, options.limit or total))
                found = _Rejudging(settings, verdicts, lambda done: bar.update(task, completed=done))
                asyncio.run(found.run(_read(files), options.limit))
                bar.update(task, total=len(found.keys))
        except KeyboardInterrupt:
            console.print(
                f"interrupted; {len(verdicts.lines)} verdicts are in {verdicts.path}; run it again to continue"
            )
            return 130
        lines = [verdicts.lines[key] for key in found.keys if key in verdicts.lines]
        report = make_report(lines, found.masked, labels, verdicts.path)
    console.print(f"verdicts: {verdicts.path}")
    _print_report(report, console)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if found.stopped:
        console.print(f"stopped: {found.stopped}; run it again to continue", style="bold red")
    return 1 if found.stopped else 0


# -- episodes and labels --------------------------------------------------------------------------


def find_records(name: str) -> tuple[list[Path], Path | None]:
    """The files of a record file, a folder of them, a run's folder, or a run in runs/, and the run's folder if it is
    one. Raises ConfigError."""
    for path in (Path(name), Path(RunConfig().directory) / name):
        if path.is_file():
            return [path], None
        if (path / "config.yaml").is_file():
            records = Config(run=RunConfig(name=path.name, directory=str(path.parent))).records_folder
            if not (files := sorted(records.glob(RECORDS))):
                raise ConfigError(f"{path} has stored no episodes in {records}; set tracking.keep_records=true")
            return files, path
        if files := sorted(path.glob(RECORDS)):
            return files, None
    raise ConfigError(f"{name} is no record file, folder of record files, or run")


def _count(files: Sequence[Path]) -> int:
    try:
        return sum(map(count_records, files))
    except (RecordError, OSError) as error:
        raise ConfigError(str(error)) from error


def _read(files: Sequence[Path]) -> Iterator[tuple[str, Trajectory]]:
    """A key of each episode, unique among the files, and the episode. Its end is inferred from its outcome where it was
    not stored, as in demonstrations. Raises ConfigError for a damaged file."""
    for path in files:
        try:
            for number, record in enumerate(read_record_file(path)):
                episode = decode_trajectory(record, copy=True)
                if not episode.end_reason:
                    end = ANSWER if episode.answer is not None else STEPS_EXHAUSTED
                    end = end if episode.outcome in TRAINABLE_OUTCOMES else episode.outcome
                    episode = replace(episode, end_reason=end)
                yield f"{path.name}:{number}", episode
        except (RecordError, OSError) as error:
            raise ConfigError(f"{path}: {error}") from error


# -- judging --------------------------------------------------------------------------------------


@dataclass
class _Rejudging:
    """Judges episodes with a regular end that have no verdict yet."""

    settings: JudgeConfig
    verdicts: VerdictFile
    progress: Callable[[int], None]  # gets the number of episodes done so far
    keys: list[str] = field(default_factory=list)  # of the episodes, in the order of the files
    masked: Counter[str] = field(default_factory=Counter)  # episodes without a regular end, by it: not judged
    stopped: str = ""  # why judging ended early
    _done: int = 0

    async def run(self, episodes: Iterator[tuple[str, Trajectory]], limit: int | None) -> None:
        """Judge at most the first `limit`. Raises ConfigError."""
        chosen = islice(self._regular(episodes), limit)  # shared by all workers; each takes the next one
        meter = LocalMeter(self.settings.budget, file=self.verdicts.path.with_name(USAGE_FILE))
        async with open_evaluator(self.settings, meter) as evaluator:
            try:
                workers = min(EPISODES_AT_ONCE, self.settings.concurrency)
                await run_together(self._work(evaluator, chosen) for _ in range(workers))
            except BudgetSpent as spent:
                self.stopped = str(spent)

    async def _work(self, evaluator: EpisodeEvaluator, episodes: Iterator[tuple[str, Trajectory]]) -> None:
        for key, trajectory in episodes:
            if not self.verdicts.holds(key, trajectory):
                self.verdicts.add(key, trajectory, await evaluator.evaluate(trajectory))
            self._done += 1
            self.progress(self._done)

    def _regular(self, episodes: Iterator[tuple[str, Trajectory]]) -> Iterator[tuple[str, Trajectory]]:
        for key, trajectory in episodes:
            if trajectory.end_reason in REGULAR_ENDS:
                self.keys.append(key)
                yield key, trajectory
            else:
                self.masked[trajectory.end_reason] += 1


# -- the report -----------------------------------------------------------------------------------


def make_report(lines: Sequence[Line], masked: Counter[str], labels: Labels | None, path: Path) -> dict[str, Any]:
    """All figures. `masked`: episodes that were not judged, by their end; `path`: the file of the verdicts.

    Raises ConfigError for labels that could be of several episodes.
    """
    stages = [stage for line in lines for stage in line["stages"]]
    names = ("calls", "prompt_tokens", "response_tokens", "dollars", "seconds")
    totals = {name: sum(line[name] for line in lines) for name in names}
    voted = [{vote["outcome"] for vote in line["votes"]} - {JUDGE_ERROR} for line in lines if line.get("votes")]
    kinds = ("evaluator", "protocol", "prompts", "outcome")
    verdicts = Counter(tuple(line[kind] for kind in kinds) for line in lines)
    report = {
        "episodes": len(lines),
        "not_judged": dict(masked),
        "outcomes": dict(Counter(line["outcome"] for line in lines)),
        "verdicts": [dict(zip((*kinds, "episodes"), (*kind, n), strict=True)) for kind, n in sorted(verdicts.items())],
        "judge_errors": dict(Counter(line["reason"] for line in lines if line["outcome"] == JUDGE_ERROR)),
        "faults": dict(Counter(name for stage in stages for name in stage["errors"])),
        "votes_differ": sum(len(each) > 1 for each in voted) / len(voted) if voted else None,
        "cost": totals,
        "cost_per_episode": {name: value / max(1, len(lines)) for name, value in totals.items()},
        "stored": agreement([(line["stored"], line["outcome"]) for line in lines]),
    }
    if labels is not None:
        labels.check(lines)
        labelled = [(label, line["outcome"]) for line in lines if (label := labels.of(line)) is not None]
        report["labels"] = agreement(labelled)
        report["labels_without_episode"] = labels.without_episode(lines)
        others = [each for each in sorted(path.parent.glob("*.jsonl")) if each != path]
        report["judges"] = judge_scores(labels, lines, path.stem, others)
    return report


def agreement(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Verdicts against references, such as labels: of each episode the reference and the verdict.

    Rates are None where nothing is counted; docs/judge.md defines them. `confusion`: counts by reference and verdict.
    """
    confusion: dict[str, dict[str, int]] = {}
    for (reference, verdict), count in sorted(Counter(pairs).items()):
        confusion.setdefault(reference, {})[verdict] = count
    decided = [pair for pair in pairs if set(pair) <= set(TRAINABLE_OUTCOMES)]
    right = [verdict for reference, verdict in pairs if reference == SUCCESS]
    wrong = [verdict for reference, verdict in pairs if reference != SUCCESS]
    return {
        "episodes": len(pairs),
        "masked": sum(verdict not in TRAINABLE_OUTCOMES for _, verdict in pairs),
        "accuracy": sum(a == b for a, b in decided) / len(decided) if decided else None,
        "false_success_rate": wrong.count(SUCCESS) / len(wrong) if wrong else None,
        "false_failure_rate": right.count(FAILURE) / len(right) if right else None,
        "confusion": confusion,
    }


def _print_report(report: dict[str, Any], console: Console) -> None:
    table = Table(title="Verdicts", title_justify="left")
    for name in ("evaluator", "protocol", "prompts", "outcome", "episodes"):
        table.add_column(name, justify="right" if name == "episodes" else "left")
    for entry in report["verdicts"]:
        table.add_row(*map(str, entry.values()))
    console.print(table)
    for key, title, share in (("stored", "Stored outcome", "agreement"), ("labels", "Label", "accuracy")):
        if (found := report.get(key)) is None:
            continue
        references, verdicts = (
            sorted(names, key=lambda name: (name != SUCCESS, name != FAILURE, name))
            for names in (found["confusion"], {verdict for row in found["confusion"].values() for verdict in row})
        )
        table = Table(title.split()[0].lower(), title=title, title_justify="left")
        for verdict in verdicts:
            table.add_column(f"judged\n{verdict}", justify="right")
        for reference in references:
            table.add_row(reference, *(str(found["confusion"][reference].get(verdict, 0)) for verdict in verdicts))
        console.print(table)
        rates = ("accuracy", "false_success_rate", "false_failure_rate")
        accuracy, success, failure = ("-" if found[name] is None else f"{found[name]:.1%}" for name in rates)
        console.print(
            f"{share} {accuracy} of episodes decided by both, false success {success}, false failure {failure}, "
            f"{found['masked']} of {found['episodes']} masked"
        )
    if report["votes_differ"] is not None:
        console.print(f"votes differ on {report['votes_differ']:.1%} of the episodes")
    if judges := report.get("judges"):
        console.print(_judge_table(judges))
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


def _judge_table(judges: Sequence[Mapping[str, Any]]) -> Table:
    """Agreement, precision and recall of each judge, with 95 % intervals (Wilson), in percent."""
    table = Table(title="Judges against labels, with 95 % intervals", title_justify="left")
    table.add_column("judge", overflow="fold")
    for name in ("episodes", *JUDGE_FIGURES):
        table.add_column(name, justify="right", no_wrap=True)
    for judge in judges:
        cells = []
        for figure in (judge[name] for name in JUDGE_FIGURES):
            low, high = figure["interval"] or (0.0, 0.0)
            cells.append("-" if figure["share"] is None else f"{figure['share']:.1%} ({low:.0%} to {high:.0%})")
        table.add_row(judge["judge"], str(judge["episodes"]), *cells)
    return table
