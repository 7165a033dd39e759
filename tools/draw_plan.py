"""Draw what moves where for one fused parameter: `python -m tools.draw_plan docs/images/plan.svg`.

The picture is made from a plan (weights/plan.py), not by hand: two tensor-parallel trainer ranks, in two replicas, on
the left; an engine of one rank and one of two on the right. Colours tell q, k and v; a band is one slice.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path
from typing import TypeVar

import transformers

from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from megatron_webrl.weights.slices import Slice

Key = TypeVar("Key")

TARGET = "language_model.model.layers.0.self_attn.qkv_proj.weight"
PROJECTION_COLOURS = {"q_proj": "#4878a8", "k_proj": "#d1803a", "v_proj": "#58944f"}
HEADS, GROUPS, DIM = 8, 4, 32
SCALE = 0.55  # pixels of a row
GAP, TOP, WIDTH = 46, 84, 92  # pixels: between bars, above them, of a bar
LEFT, RIGHT = 60, 560


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
    """Bars of parameters at both sides, and the bands between them."""

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
        """The picture."""
        bottom = max(top + rows * SCALE for bars in (self.senders, self.receivers) for top, rows in bars.values())
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {RIGHT + WIDTH + LEFT} {bottom + 60:.0f}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            _text(LEFT, 22, "the trainer's linear_qkv", bold=True),
            _text(LEFT, 38, "q, k and v of a group together"),
            _text(RIGHT, 22, "the engines' qkv_proj", bold=True),
            _text(RIGHT, 38, "all q, then all k, then all v"),
        ]
        parts += [self._band(*item) for item in self.slices]
        for rank, (top, rows) in self.senders.items():
            label = f"rank {rank}: tensor {rank % 2}, replica {rank // 2}, {self.plan.trainer.nodes[rank]}"
            parts += [_text(LEFT, top - 6, label), _bar(LEFT, top, rows)]
        for (engine, rank), (top, rows) in self.receivers.items():
            label = f"engine {engine}, rank {rank}, {self.plan.engines.nodes[engine][rank]}"
            parts += [_text(RIGHT, top - 6, label), _bar(RIGHT, top, rows)]
        for number, (name, colour) in enumerate(PROJECTION_COLOURS.items()):
            x = LEFT + 80 * number
            parts.append(f'<rect x="{x}" y="{bottom + 30:.0f}" width="12" height="12" fill="{colour}"/>')
            parts.append(_text(x + 18, bottom + 41, name))
        return "\n".join([*parts, "</svg>\n"])

    def _band(self, sender: int, engine: int, receiver: int, piece: Slice) -> str:
        colour = PROJECTION_COLOURS[piece.hf_param.split(".")[-2]]
        height = piece.size[0] * SCALE
        y0 = self.senders[sender][0] + piece.source_offset[0] * SCALE
        y1 = self.receivers[engine, receiver][0] + piece.target_offset[0] * SCALE
        x0, x1, middle = LEFT + WIDTH, RIGHT, (LEFT + WIDTH + RIGHT) / 2
        path = (
            f"M{x0},{y0:.1f} C{middle},{y0:.1f} {middle},{y1:.1f} {x1},{y1:.1f} v{height:.1f} "
            f"C{middle},{y1 + height:.1f} {middle},{y0 + height:.1f} {x0},{y0 + height:.1f} Z"
        )
        blocks = "".join(
            f'<rect x="{x}" y="{y:.1f}" width="{WIDTH}" height="{height:.1f}" fill="{colour}" stroke="white" '
            'stroke-width="0.5"/>'
            for x, y in ((LEFT, y0), (RIGHT, y1))
        )
        return f'<path d="{path}" fill="{colour}" fill-opacity="0.35"/>{blocks}'


def _stack(bars: list[tuple[Key, int]]) -> dict[Key, tuple[float, int]]:
    """Top, in pixels, and rows of each bar, one under the other."""
    placed, top = {}, float(TOP)
    for key, rows in bars:
        placed[key] = (top, rows)
        top += rows * SCALE + GAP
    return placed


def _bar(x: int, top: float, rows: int) -> str:
    return f'<rect x="{x}" y="{top:.1f}" width="{WIDTH}" height="{rows * SCALE:.1f}" fill="none" stroke="#333"/>'


def _text(x: float, y: float, words: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y:.1f}"{weight} fill="#222">{escape(words)}</text>'


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw what moves where for one fused parameter, from a real plan.")
    parser.add_argument("out", type=Path, help="SVG file to write")
    options = parser.parse_args()
    options.out.write_text(Drawing(make_plan()).svg())


if __name__ == "__main__":
    main()
