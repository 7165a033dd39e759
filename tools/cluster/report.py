"""Predictions of several sizes together: the simulations, their tables, and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_webrl.tracking.plot import LAST, OTHER, OURS, PEER, Plot, page
from tools.cluster.inputs import Inputs, changed
from tools.cluster.predicted import Amount, Prediction, predict, recommended, splits, together

VARIANTS: tuple[dict[str, float], ...] = (
    {}, {"browser": 1.0}, {"browser": 16.0}, {"response": 960}, {"prompt": 7500}, {"max_staleness": 1},
    {"max_staleness": 4}, {"batch": 32}, {"drop": 0},
)  # fmt: skip
BEGIN = "<!-- from here on written by tools.simulate_cluster -->"
END = "<!-- to here -->"

SPLIT_COLUMNS = (
    "engines:trainers", "trajectories/h", "staleness", "most", "engines idle", "engines' load", "trainers wait",
    "tokens wasted",
)  # fmt: skip
MODE_COLUMNS = ("mode", "GPUs", "trajectories/h", "async / this", "engines idle", "trainers wait")
VARIANT_COLUMNS = (
    "changed", "split", "trajectories/h", "staleness", "engines' load", "trainers wait", "sync, in turns",
    "async / sync",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """One cluster: every split under async, and other modes."""

    nodes: int
    splits: tuple[Prediction, ...]
    others: tuple[Prediction, ...]

    @property
    def best(self) -> Prediction:
        """The recommended split."""
        return recommended(self.splits)


@dataclass(frozen=True)
class Variant:
    """The first cluster with an input changed."""

    change: dict[str, float]
    best: Prediction
    sync: Prediction  # free-running, all GPUs in turns


@dataclass(frozen=True)
class Report:
    """All that was simulated."""

    inputs: Inputs
    amount: Amount
    seed: int
    sizes: tuple[Size, ...]
    variants: tuple[Variant, ...]


def make(
    inputs: Inputs, nodes: Sequence[int], changes: Sequence[Mapping[str, float]], amount: Amount, seed: int,
    tell: Callable[[str], None],
) -> Report:  # fmt: skip
    """Simulate everything; `tell` is told what is being simulated. Raises ValueError for changes out of range."""
    variants = [(dict(change), changed(inputs, dict(change))) for change in changes]
    sizes = []
    for number in nodes:
        tell(f"{number} nodes ...")
        found = tuple(predict(inputs, split, amount=amount, seed=seed) for split in splits(number, int(inputs.gpus)))
        sizes.append(Size(number, found, other_modes(inputs, recommended(found), amount, seed)))
    done = []
    for change, given in variants:
        tell(f"{nodes[0]} nodes, {words(change)} ...")
        tried = [predict(given, split, amount=amount, seed=seed) for split in splits(nodes[0], int(given.gpus))]
        sync = predict(given, together(nodes[0], int(given.gpus)), "sync", amount=amount, seed=seed)
        done.append(Variant(change, recommended(tried), sync))
    return Report(inputs, amount, seed, tuple(sizes), tuple(done))


def other_modes(inputs: Inputs, best: Prediction, amount: Amount, seed: int) -> tuple[Prediction, ...]:
    """The loops that wait, on the split of `best` and with all GPUs in turns."""
    shared = together(best.split.nodes, int(inputs.gpus))
    contestants = (
        (best.split, "one_step_off", "free"), (best.split, "sync", "free"), (shared, "sync", "free"),
        (shared, "sync", "lockstep"),
    )  # fmt: skip
    return tuple(predict(inputs, split, mode, stepping, amount, seed) for split, mode, stepping in contestants)


def words(change: Mapping[str, float]) -> str:
    """A changed input, as it is given on the command line."""
    return ", ".join(f"{name}={value:g}" for name, value in change.items()) or "nothing"


# -- rows ------------------------------------------------------------------------------------------


def split_row(one: Prediction, best: bool) -> list[str]:
    """Of a split under async."""
    found, mark = one.result, "**" if best else ""
    shares = (found.engines_idle, found.engines_load, found.waiting, found.wasted)
    return [
        f"{mark}{one.split}{mark}", f"{mark}{found.per_hour:,.0f}{mark}", f"{found.staleness:.2f}",
        str(found.staleness_max), *map(_percent, shares),
    ]  # fmt: skip


def mode_row(one: Prediction, best: Prediction) -> list[str]:
    """Of a mode, against the recommended split under async."""
    found = one.result
    mode = one.mode + (", in step" if one.stepping == "lockstep" else "")
    gain = best.result.per_hour / found.per_hour
    return [
        f"`{one.mode}`" + mode.removeprefix(one.mode), str(one.split), f"{found.per_hour:,.0f}", f"{gain:.1f}",
        _percent(found.engines_idle), _percent(found.waiting),
    ]  # fmt: skip


def variant_row(variant: Variant) -> list[str]:
    """Of a changed input."""
    found, sync = variant.best.result, variant.sync.result
    return [
        words(variant.change), str(variant.best.split), f"{found.per_hour:,.0f}", f"{found.staleness:.2f}",
        _percent(found.engines_load), _percent(found.waiting), f"{sync.per_hour:,.0f}",
        f"{found.per_hour / sync.per_hour:.1f}",
    ]  # fmt: skip


def input_rows(inputs: Inputs) -> list[list[str]]:
    """Of every input."""
    return [
        [f"`{f.name}`", _plain(getattr(inputs, f.name)), f.metadata["meaning"], f.metadata["source"]]
        for f in dataclasses.fields(inputs)
    ]


def tables(report: Report) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, columns and rows of each table, without that of the inputs."""
    made: list[tuple[str, Sequence[str], list[list[str]]]] = []
    for size in report.sizes:
        gpus, best = size.nodes * report.inputs.gpus, size.best
        batch = size.nodes * report.inputs.batch
        title = f"{size.nodes} nodes, {gpus} GPUs, batches of {batch} trajectories, `async`"
        made.append((title, SPLIT_COLUMNS, [split_row(one, one is best) for one in size.splits]))
        rows = [mode_row(one, best) for one in (best, *size.others)]
        made.append((f"{size.nodes} nodes, modes", MODE_COLUMNS, rows))
    if report.variants:
        title = f"{report.sizes[0].nodes} nodes, one input changed, each with its recommended split"
        made.append((title, VARIANT_COLUMNS, [variant_row(variant) for variant in report.variants]))
    return made


def _plain(value: float) -> str:
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# -- page, picture, figures ------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """What docs/scaling.md holds between its marks."""
    parts = [recommendation(report)]
    for title, columns, rows in tables(report):
        parts.append(f"**{title}**")
        parts.append(_table(columns, rows))
    parts.append("**Inputs**")
    parts.append(_table(("name", "value", "meaning", "source"), input_rows(report.inputs)))
    return "\n\n".join(parts)


def recommendation(report: Report) -> str:
    """The recommended split of each size, in a sentence."""
    said = []
    for size in report.sizes:
        split, found = size.best.split, size.best.result
        said.append(
            f"{size.nodes} nodes: {split.engines // size.nodes} GPUs of each node for engines, "
            f"{split.trainers // size.nodes} for the trainer ({found.per_hour:,.0f} trajectories an hour predicted)"
        )
    return "Recommended: " + "; ".join(said) + "."


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written(text: str, report: Report) -> str:
    """The page with what is between its marks replaced. Raises ValueError if it has no marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no place for the tables: no line {BEGIN!r} with a line {END!r} after it")
    return f"{before}{BEGIN}\n\n{markdown(report)}\n\n{END}{after}"


def draw(report: Report) -> str:
    """Throughput and idle shares over the splits of each size, as an SVG."""
    return page([plot for size in report.sizes for plot in (_throughput(size, report.inputs), _shares(size))])


def _engines(one: Prediction) -> float:
    return one.split.engines / one.split.nodes


def _throughput(size: Size, inputs: Inputs) -> Plot:
    fastest = max(one.result.per_hour for one in size.splits)
    plot = Plot(f"{size.nodes} nodes", "trained trajectories an hour, predicted", (int(inputs.gpus), 1.8 * fastest))
    plot.axes("GPUs of a node for engines", "trajectories/h")
    plot.line([(_engines(one), one.result.per_hour) for one in size.splits], OURS)
    plot.dot(_engines(size.best), size.best.result.per_hour, OURS)
    plot.key(0, "async; the dot is recommended", OURS)
    for number, (one, colour) in enumerate(zip(size.others, (LAST, OTHER, "#8a5a9e", PEER), strict=True), 1):
        rate = one.result.per_hour
        plot.line([(0, rate), (inputs.gpus, rate)], colour)
        where = "all GPUs in turns" if one.split.shared else "recommended split"
        plot.key(number, f"{one.mode.replace('_', ' ')}, {one.stepping}, {where}", colour)
    return plot


def _shares(size: Size) -> Plot:
    gpus = max(map(_engines, size.splits)) + 1
    plot = Plot(f"{size.nodes} nodes, waiting", "async, share of time, predicted", (gpus, 1.5))
    plot.axes("GPUs of a node for engines", "share")
    curves = (("trainers wait for groups", "waiting", OTHER), ("engines without a request", "engines_idle", OURS))
    for number, (name, key, colour) in enumerate(curves):
        plot.line([(_engines(one), getattr(one.result, key)) for one in size.splits], colour)
        plot.key(number, name, colour)
    return plot


def figures(report: Report) -> dict[str, Any]:
    """Everything, for a JSON file."""
    return {
        "inputs": asdict(report.inputs),
        "amount": asdict(report.amount),
        "seed": report.seed,
        "sizes": [
            {
                "nodes": size.nodes,
                "recommended": asdict(size.best.split),
                "splits": [asdict(one) for one in size.splits],
                "modes": [asdict(one) for one in size.others],
            }
            for size in report.sizes
        ],
        "variants": [asdict(variant) for variant in report.variants],
    }
