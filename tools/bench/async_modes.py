"""Trained trajectories per hour in asynchronous and synchronous modes: whole jobs, one after another.

    python -m tools.bench.async_modes [--quick] [--updates N] [--json FILE] [--plots FILE]

Every job is `webrl train` with the same model, tasks, batch and number of updates: a tiny Qwen3-VL after imitation of
scripts does multi-step tasks on sites with the response times of the web. Jobs differ in rollout.mode and
rollout.stepping only. The first update is not counted, since it waits for engines and pages to start. Groups without
variance are trained like others: the benchmark measures time, not learning.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table

from megatron_webrl.track import episodes, summary
from tools.arguments import make_bench_parser, write_json
from tools.bench.jobs import run_job
from tools.make_tiny_model import make_tiny_model
from tools.plot import BLUE, GREEN, GREY, ORANGE, add_legend, add_titles, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTESTANTS: dict[str, tuple[str, ...]] = {
    "async": ("rollout.mode=async",),
    "one step off": ("rollout.mode=one_step_off",),
    "sync, free-running": ("rollout.mode=sync",),
    "sync, lockstep": ("rollout.mode=sync", "rollout.stepping=lockstep"),
}
OURS_NAME, PEER_NAME, GOAL = "async", "sync, free-running", 2.9  # the peer waits as WebGym does: between batches only
COLOURS = dict(zip(CONTESTANTS, (BLUE, GREEN, ORANGE, GREY), strict=True))
PIXELS = 320 * 240  # of a page for the model; small, since two cores stand in for GPUs
ENVIRONMENTS = ("shop-save-item", "shop-buy-item", "forum-follow-thread", "calendar-create", "wiki-watch", "forms-vote")


@dataclass(frozen=True)
class ModesBenchSize:
    """Size of the benchmark."""

    updates: int
    demonstrations: int
    epochs: int
    groups: int  # per update
    group_size: int


FULL = ModesBenchSize(updates=6, demonstrations=80, epochs=6, groups=4, group_size=8)
QUICK = ModesBenchSize(updates=2, demonstrations=8, epochs=1, groups=1, group_size=2)


@dataclass(frozen=True)
class ModeResult:
    """Result of one job. Fractions are of the time from the end of the first update to the end of the last."""

    name: str
    seconds: float
    trajectories: int  # trained in this time
    per_hour: float
    waiting: float  # fraction of time in which the trainer waited for groups
    training: float
    syncing: float
    idle: float  # fraction of time in which an engine had no request
    wasted: float  # fraction of response tokens that were never trained, whole run
    staleness: float  # versions, mean over trajectories
    curve: tuple[tuple[float, int], ...]  # seconds, trajectories trained until then


def configuration(folder: Path, amount: ModesBenchSize, environments: Sequence[str]) -> dict[str, Any]:
    """The configuration shared by all jobs."""
    return {
        "model": {"path": str(folder / "model")},
        "trainer": {
            "updates": amount.updates,
            "groups_per_update": amount.groups,
            "tokens_per_microbatch": 16384,
            "zero_variance_groups": "keep",
            "optimizer": {"learning_rate": 1e-5, "schedule": "constant", "warmup_fraction": 0.0},
        },
        "rollout": {
            "group_size": amount.group_size,
            "groups_in_flight": 2 * amount.groups,
            "max_new_tokens": 64,
            "max_model_len": 4096,
            "kv_cache_mib": 256,
            "context": {"response_format": "bare", "compact": True, "history_turns": 1},
        },
        "tasks": {
            "source": "sites",
            "environments": list(environments),
            "max_steps": 6,
            "latency": {"median_seconds": 2.0, "sigma": 1.0},
        },
        "browser": {"width": 640, "height": 480, "screenshot": "jpeg"},
        "tracking": {"episodes_gib": 0.0},
        "ring": {"capacity_mib": 512},
    }


def warm_start(folder: Path, amount: ModesBenchSize) -> Path:
    """Train a checkpoint by imitation of scripts."""
    overrides = [
        "trainer.updates=0",
        f"trainer.warm_start.demonstrations={amount.demonstrations}",
        f"trainer.warm_start.epochs={amount.epochs}",
        "trainer.warm_start.samples_per_update=16",
        "tasks.latency.median_seconds=0",
    ]
    return run_job(folder / "config.yaml", "warm-start", overrides, folder) / "checkpoints" / "version-000000"


def figures(name: str, run: Path) -> ModeResult:
    """Read the result of a job. Raises RuntimeError if its accounting does not match."""
    accounting = summary.read_summary(run)["accounting"]
    if not accounting["matches"]:
        raise RuntimeError(f"the accounting of {run} does not match: {accounting}")
    updates = summary.read_updates(run)
    begin, counted = updates[0], updates[1:]
    trained = [line["version"] + 1 for line in episodes.read_lines(run) if line["disposition"] == episodes.TRAINED]
    seconds = counted[-1]["finished_at"] - begin["finished_at"]
    done, curve = 0, [(0.0, 0)]
    for update in counted:
        done += trained.count(update["version"])
        curve.append((update["finished_at"] - begin["finished_at"], done))

    def share(part: str) -> float:
        return float(sum(update["seconds"][part] for update in counted) / seconds)

    def mean(key: str) -> float:
        return float(sum(update["extra"].get(key, 0.0) for update in counted) / len(counted))

    return ModeResult(
        name=name,
        seconds=seconds,
        trajectories=done,
        per_hour=3600 * done / seconds,
        waiting=share("wait"),
        training=share("train"),
        syncing=share("sync"),
        idle=mean("engine/idle_fraction"),
        wasted=updates[-1]["extra"]["wasted_token_fraction"],
        staleness=sum(update["staleness_mean"] for update in counted) / len(counted),
        curve=tuple(curve),
    )


def measure(amount: ModesBenchSize, environments: Sequence[str], console: Console) -> list[ModeResult]:
    """Run all jobs, one after another. Raises RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as temporary:
        folder = Path(temporary)
        make_tiny_model(folder / "model", max_pixels=PIXELS)
        (folder / "config.yaml").write_text(yaml.safe_dump(configuration(folder, amount, environments)))
        console.print("warm start ...")
        checkpoint = warm_start(folder, amount)
        found = []
        for name, overrides in CONTESTANTS.items():
            console.print(f"{name} ...")
            plain = name.replace(",", "").replace(" ", "-")
            run = run_job(folder / "config.yaml", plain, [*overrides, f"model.checkpoint={checkpoint}"], folder)
            found.append(figures(name, run))
        return found


def show(found: Sequence[ModeResult], amount: ModesBenchSize, console: Console) -> None:
    """Print the table."""
    table = Table(title="Trained trajectories per hour", title_justify="left")
    columns = "", "per hour", "async / this", "trainer waits", "trains", "syncs", "engine idle", "wasted", "stale"
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    best = {each.name: each for each in found}[OURS_NAME]
    for each in found:
        shares = (each.waiting, each.training, each.syncing, each.idle, each.wasted)
        table.add_row(
            each.name, f"{each.per_hour:.0f}", f"{best.per_hour / each.per_hour:.2f}",
            *(f"{share:.1%}" for share in shares), f"{each.staleness:.2f}",
        )  # fmt: skip
    console.print(table)
    gain = best.per_hour / {each.name: each for each in found}[PEER_NAME].per_hour
    verdict = "met" if gain >= GOAL else "missed"
    console.print(f"async against {PEER_NAME}: {gain:.2f} (goal {GOAL}: {verdict})", highlight=False)
    console.print(
        f"{amount.updates} updates of {amount.groups} x {amount.group_size} trajectories; fractions are of the time "
        "after the first update; wasted: response tokens never trained, of the whole run; stale: versions, mean",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def draw(results: Sequence[ModeResult]) -> str:
    """Trajectories trained over time, as SVG."""

    def panel(axes: Axes) -> None:
        add_titles(axes, "Trained trajectories", "after the first update", "seconds", "trajectories")
        for each in results:
            seconds, trained = zip(*each.curve, strict=True)
            label = f"{each.name}, {each.per_hour:.0f}/h"
            axes.plot(seconds, trained, "o-", color=COLOURS[each.name], markersize=4, label=label)
        axes.set_xlim(0)
        axes.set_ylim(0)
        add_legend(axes)

    return render_svg([panel])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_bench_parser(__doc__, "two small updates each; figures mean little")
    parser.add_argument("--updates", type=int, metavar="N", help=f"updates of each job (default: {FULL.updates})")
    parser.add_argument("--environments", nargs="+", metavar="NAME", default=ENVIRONMENTS, help="of the sites")
    parser.add_argument("--plots", type=Path, metavar="FILE", help="draw the figures as SVG")
    options = parser.parse_args(arguments)
    amount = QUICK if options.quick else FULL
    if options.updates is not None:
        if options.updates < 2:
            parser.error(f"--updates={options.updates}: the first one is not counted; give at least 2")
        amount = ModesBenchSize(**asdict(amount) | {"updates": options.updates})
    console = Console()
    try:
        found = measure(amount, options.environments, console)
    except RuntimeError as error:
        sys.exit(f"bench.async_modes: {error}")
    show(found, amount, console)
    if options.plots:
        options.plots.write_text(draw(found))
    write_json(options.json, _figures(found, amount))


def _figures(found: Sequence[ModeResult], amount: ModesBenchSize) -> Mapping[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "amount": asdict(amount),
        "jobs": [asdict(f) for f in found],
    }


if __name__ == "__main__":
    main()
