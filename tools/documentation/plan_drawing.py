"""The drawing of a transfer plan: one fused parameter.

The figure shows a real plan (weights/plan.py). Left: two replicas of two tensor-parallel trainer ranks. Right: an
engine of one rank and one of two. Colours mark q, k and v; a band is one slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import transformers

from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from megatron_webrl.weights.slices import Slice
from tools.plot import BLACK, DARK_GREY, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Key = TypeVar("Key")

TARGET = "language_model.model.layers.0.self_attn.qkv_proj.weight"
PROJECTION_COLOURS = {"q_proj": "#4878a8", "k_proj": "#d1803a", "v_proj": "#58944f"}
HEADS, GROUPS, DIM = 8, 4, 32
GAP = 80.0  # between two bars, in parameter rows
LEFT, RIGHT, WIDTH = 0.0, 5.0, 1.0  # left edges of both columns of bars, width of a bar


def make_plan() -> TransferPlan:
    """Four trainer ranks, two tensor-parallel in two replicas; engines of one and of two ranks."""
    description = transformers.Qwen3VLConfig(
        text_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS, "head_dim": DIM, "vocab_size": 512,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    )  # fmt: skip
    trainer = TrainerTopology(ParallelSizes(tensor=2), 4, ("node 0", "node 0", "node 1", "node 1"))
    engines = EngineTopology((EngineSizes(), EngineSizes(tensor=2)), (("node 0",), ("node 1", "node 1")))
    return TransferPlan(description, trainer, engines, 2, 2**20)


class Drawing:
    """A bar for the parameter of each rank on both sides, and a band for each slice."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self.slices: list[tuple[int, int, int, Slice]] = []  # sender, engine, receiver, slice
        for engine in range(len(plan.engines.nodes)):
            for message in plan.messages(engine):
                found = [piece for piece in message.slices if piece.target_param == TARGET]
                self.slices += [(message.sender, engine, message.receiver, piece) for piece in found]
        rows = (HEADS + 2 * GROUPS) * DIM
        self.senders = _stack([(rank, rows // 2) for rank in range(plan.trainer.ranks)])
        receivers = [
            ((engine, rank), rows // sizes.ranks)
            for engine, sizes in enumerate(plan.engines.sizes)
            for rank in range(sizes.ranks)
        ]
        self.receivers = _stack(receivers)

    def svg(self) -> str:
        """The figure."""
        return render_svg([self._draw], (7.2, 7.0))

    def _draw(self, axes: Axes) -> None:
        from matplotlib.patches import Patch

        columns = (
            (LEFT + WIDTH, "right", "trainer: linear_qkv", "q, k and v of a group together"),
            (RIGHT, "left", "engines: qkv_proj", "all q, then all k, then all v"),
        )
        for x, side, title, order in columns:
            axes.text(x, -100, title, weight="bold", fontsize=11, ha=side)
            axes.text(x, -60, order, color=DARK_GREY, ha=side)
        for item in self.slices:
            self._draw_slice(axes, *item)
        for rank, (top, rows) in self.senders.items():
            label = f"rank {rank}: tensor {rank % 2}, replica {rank // 2}, {self.plan.trainer.nodes[rank]}"
            _draw_bar(axes, LEFT, top, rows)
            axes.text(LEFT + WIDTH, top - 8, label, ha="right")
        for (engine, rank), (top, rows) in self.receivers.items():
            label = f"engine {engine}, rank {rank}, {self.plan.engines.nodes[engine][rank]}"
            _draw_bar(axes, RIGHT, top, rows)
            axes.text(RIGHT, top - 8, label)
        bottom = max(top + rows for bars in (self.senders, self.receivers) for top, rows in bars.values())
        axes.set_xlim(LEFT - 1.6, RIGHT + WIDTH + 0.8)
        axes.set_ylim(bottom + 10, -130)
        axes.set_axis_off()
        handles = [Patch(color=colour, label=name) for name, colour in PROJECTION_COLOURS.items()]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=3)

    def _draw_slice(self, axes: Axes, sender: int, engine: int, receiver: int, piece: Slice) -> None:
        """One slice: its rows in both bars, and a band between them."""
        from matplotlib.patches import PathPatch, Rectangle
        from matplotlib.path import Path as Curve

        colour = PROJECTION_COLOURS[piece.hf_param.split(".")[-2]]
        height = piece.size[0]
        y0 = self.senders[sender][0] + piece.source_offset[0]
        y1 = self.receivers[engine, receiver][0] + piece.target_offset[0]
        x0, x1, middle = LEFT + WIDTH, RIGHT, (LEFT + WIDTH + RIGHT) / 2
        outline = [
            (x0, y0), (middle, y0), (middle, y1), (x1, y1), (x1, y1 + height), (middle, y1 + height),
            (middle, y0 + height), (x0, y0 + height), (x0, y0),
        ]  # fmt: skip
        codes = [Curve.MOVETO, *[Curve.CURVE4] * 3, Curve.LINETO, *[Curve.CURVE4] * 3, Curve.CLOSEPOLY]
        axes.add_patch(PathPatch(Curve(outline, codes), facecolor=colour, alpha=0.35, linewidth=0))
        for x, y in ((LEFT, y0), (RIGHT, y1)):
            axes.add_patch(Rectangle((x, y), WIDTH, height, facecolor=colour, edgecolor="white", linewidth=0.5))


def _stack(bars: list[tuple[Key, int]]) -> dict[Key, tuple[float, int]]:
    """Top and number of rows of each bar, one below the other."""
    placed, top = {}, 0.0
    for key, rows in bars:
        placed[key] = (top, rows)
        top += rows + GAP
    return placed


def _draw_bar(axes: Axes, x: float, top: float, rows: int) -> None:
    """The outline of a parameter."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, top), WIDTH, rows, fill=False, edgecolor=BLACK))


def svg() -> str:
    """The figure of `make_plan`."""
    return Drawing(make_plan()).svg()
