"""The command line of `webrl judge`."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.setting import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_webrl.config.judge import JudgeConfig
    from megatron_webrl.judge.agreement import Agreement, EpisodeKey
    from megatron_webrl.judge.judging import JudgedEpisodes
    from megatron_webrl.judge.stored_episodes import StoredEpisodes
    from megatron_webrl.judge.verdict_file import VerdictFile

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

    from megatron_webrl.judge.agreement import read_labels
    from megatron_webrl.judge.stored_episodes import StoredEpisodes
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
    from megatron_webrl.judge.judging import judge_episodes
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
    from megatron_webrl.judge.agreement import Agreement

    return Agreement.of((line["stored"], line["outcome"]) for line in lines)


def label_agreement(lines: Sequence[Line], labels: dict[EpisodeKey, str]) -> Agreement:
    """Verdicts against labels, of the episodes that have one."""
    from megatron_webrl.judge.agreement import Agreement

    keyed = [((line["ticket"], line["index"]), line["outcome"]) for line in lines]
    return Agreement.of((labels[key], outcome) for key, outcome in keyed if key in labels)


def _print_report(
    report: dict[str, Any], lines: Sequence[Line], labels: dict[EpisodeKey, str] | None, console: Console
) -> None:
    from rich.table import Table

    from megatron_webrl.judge.agreement import percent

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
