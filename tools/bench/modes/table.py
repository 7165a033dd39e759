"""What the runs of each mode say, and the table of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from tools.bench.async_modes import OURS_NAME
from tools.bench.modes.comparison import Figure, Ratio, Spread, ratio, spread
from tools.bench.modes.history import (
    RunHistory,
    TimeShares,
    TimeToSuccess,
    time_shares,
    time_to_success,
    wasted_shares,
    wasted_with_signal,
)
from tools.bench.modes.runs import Target

SIGNS = {"exact": "", "at_least": "≥ ", "at_most": "≤ "}
PATH_PARTS = 3  # of the critical path, in the table

Rows = dict[str, Callable[["ModeFigures"], str]]  # the cell of a mode, by label


@dataclass(frozen=True)
class SeedFigures:
    """One run. All but `wasted` are of the updates until the success, or of the whole run if it is censored."""

    seed: int
    end: TimeToSuccess
    staleness: float  # versions, mean over updates
    shares: TimeShares | None
    wasted: Mapping[str, float]  # of the whole run, by reason


@dataclass(frozen=True)
class ModeFigures:
    """All runs of a mode, and its comparison with async, of which ratios are the numerators."""

    mode: str
    seeds: tuple[SeedFigures, ...]
    time_ratio: Ratio | None  # of the times to success
    rate_ratio: Ratio | None  # of the trained trajectories per hour

    def over_seeds(self, value: Callable[[SeedFigures], float | None], *, until_success: bool = False) -> Spread | None:
        """The spread of a value; a run has none if it is None. `until_success`: that of a censored run is a bound."""
        found = [
            Figure(number, until_success and not each.end.reached)
            for each in self.seeds
            if (number := value(each)) is not None
        ]
        return spread(found) if found else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "reached": sum(each.end.reached for each in self.seeds),
            "seconds": _json(self.over_seeds(lambda each: each.end.seconds, until_success=True)),
            "per_hour": _json(self.over_seeds(lambda each: each.end.per_hour)),
        }


def mode_figures(histories: Sequence[RunHistory], target: Target) -> list[ModeFigures]:
    """The figures of each mode, in the order of the histories."""
    by_mode: dict[str, list[SeedFigures]] = {}
    for history in histories:
        by_mode.setdefault(history.mode, []).append(_seed_figures(history, target))

    ours = by_mode.get(OURS_NAME, [])

    def compared(seeds: Sequence[SeedFigures], figure: Callable[[SeedFigures], Figure]) -> Ratio | None:
        return ratio({each.seed: figure(each) for each in ours}, {each.seed: figure(each) for each in seeds})

    return [
        ModeFigures(mode, tuple(seeds), time_ratio=compared(seeds, _time), rate_ratio=compared(seeds, _rate))
        for mode, seeds in by_mode.items()
    ]


def _seed_figures(history: RunHistory, target: Target) -> SeedFigures:
    end = time_to_success(history.updates, target.success, target.window)
    counted = history.updates[: end.updates]
    return SeedFigures(
        seed=history.seed,
        end=end,
        staleness=sum(update.staleness for update in counted) / len(counted),
        shares=time_shares(counted),
        wasted=wasted_shares(history.tokens_trained, history.tokens_dropped),
    )


def _time(each: SeedFigures) -> Figure:
    return Figure(each.end.seconds, not each.end.reached)


def _rate(each: SeedFigures) -> Figure:
    return Figure(each.end.per_hour)


def make_table(figures: Sequence[ModeFigures], target: Target) -> Table:
    """A column for each mode: mean over seeds, with least and largest."""
    title = f"Time to {target.success:.0%} of sampled episodes, mean of {target.window} updates"
    caption = "mean (least to largest) over seeds; ratios of means with 95 % bootstrap intervals over seeds"
    if not all(each.end.reached for mode in figures for each in mode.seeds):
        caption += f"; ≥, ≤: bounds, since a run ended after {target.updates} updates without the success"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("")
    for mode in figures:
        table.add_column(mode.mode, justify="right")
    reasons = sorted({reason for mode in figures for each in mode.seeds for reason in each.wasted})
    for section in (_time_rows(), _rate_rows(), _share_rows(), _waste_rows(reasons)):
        for label, cell in section.items():
            table.add_row(label, *map(cell, figures))
        table.add_section()
    return table


def _time_rows() -> Rows:
    return {
        "runs that reached it": lambda mode: f"{sum(each.end.reached for each in mode.seeds)} of {len(mode.seeds)}",
        "minutes": _over_seeds(lambda each: each.end.seconds / 60, ".1f", until_success=True),
        "  async / this": lambda mode: _ratio(mode.time_ratio),
        "updates": _over_seeds(lambda each: each.end.updates, ".0f", until_success=True),
        "trained trajectories": _over_seeds(lambda each: each.end.trajectories, ".0f", until_success=True),
        "sampled episodes": _over_seeds(lambda each: each.end.episodes, ".0f", until_success=True),
    }


def _rate_rows() -> Rows:
    return {
        "trained per hour": _over_seeds(lambda each: each.end.per_hour, ".0f"),
        "  async / this": lambda mode: _ratio(mode.rate_ratio),
        "staleness, versions": _over_seeds(lambda each: each.staleness, ".2f"),
    }


def _share_rows() -> Rows:
    shares: dict[str, Callable[[TimeShares], float | None]] = {
        "trainer computes": lambda found: found.training,
        "waits for groups": lambda found: found.waiting,
        "exchanges weights": lambda found: found.exchanging,
        "checkpoints, logs": lambda found: found.other,
        "engines idle": lambda found: found.engine_idle,
    }
    rows = {label: _over_seeds(_of_shares(share), ".1%") for label, share in shares.items()}
    return rows | {"longest on critical path": _longest}


def _waste_rows(reasons: Sequence[str]) -> Rows:
    rows = {
        "wasted tokens": _over_seeds(lambda each: sum(each.wasted.values()), ".1%"),
        "  except one-outcome groups": _over_seeds(lambda each: wasted_with_signal(each.wasted), ".1%"),
    }
    return rows | {f"  {reason}": _over_seeds(_of_reason(reason), ".1%") for reason in reasons}


def _over_seeds(
    value: Callable[[SeedFigures], float | None], form: str, *, until_success: bool = False
) -> Callable[[ModeFigures], str]:
    return lambda mode: _cell(mode.over_seeds(value, until_success=until_success), form)


def _of_shares(share: Callable[[TimeShares], float | None]) -> Callable[[SeedFigures], float | None]:
    return lambda each: None if each.shares is None else share(each.shares)


def _of_reason(reason: str) -> Callable[[SeedFigures], float | None]:
    return lambda each: each.wasted.get(reason, 0.0)


def _longest(mode: ModeFigures) -> str:
    """The longest parts of the critical path, means over seeds."""
    paths = [each.shares.path for each in mode.seeds if each.shares is not None]
    names = dict.fromkeys(name for path in paths for name in path)
    means = {name: sum(path.get(name, 0.0) for path in paths) / len(paths) for name in names}
    longest = sorted(means.items(), key=lambda each: -each[1])[:PATH_PARTS]
    return "\n".join(f"{name} {share:.0%}" for name, share in longest) or "-"


def _cell(found: Spread | None, form: str) -> str:
    if found is None:
        return "-"
    mean, low, high = (_figure(figure, form) for figure in (found.mean, found.low, found.high))
    return mean if low == high else f"{mean} ({low} to {high})"


def _figure(figure: Figure, form: str) -> str:
    return f"{SIGNS['at_least'] if figure.censored else ''}{figure.value:{form}}"


def _ratio(found: Ratio | None) -> str:
    if found is None:
        return "-"
    text = f"{SIGNS[found.bound]}{found.value:.2f}"
    return text if found.interval is None else f"{text} ({found.interval[0]:.2f} to {found.interval[1]:.2f})"


def _json(found: Spread | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)
