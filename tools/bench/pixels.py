"""What screenshots cost before they can be trained on, and how much of it worker processes hide behind training.

1. Milliseconds of one thread for an image: transformers' image processor, which does everything, against what a worker
   does (decode, resize, cut into bytes) and what is left to the learner (numbers made of the bytes).
2. Rows of real screenshots through a small real model, forward and backward, with pixels made in the process before
   the first row, and by one and two workers ahead of each row; against the same rows with pixels that are there.

    python -m tools.bench.pixels [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform as machine
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from megatron_webrl.config import Config
from megatron_webrl.model import platform as platforms
from megatron_webrl.model.description import describe
from megatron_webrl.model.processing import Processor
from megatron_webrl.parity.pages import draw_page
from megatron_webrl.trainer.batching import Sample
from megatron_webrl.trainer.cost import Cost
from megatron_webrl.trainer.rows import Microbatch, RowBuilder
from tools.make_tiny_model import make_tiny_model

SIZES = ((1280, 720), (1280, 768), (160, 224))
"""Pixels. At 1280x720 and only there an image has to be resized: 720 is no multiple of 32."""
LIMIT = 2**24
"""Pixels up to which the image processor leaves an image as large as it is."""
RESPONSE = 16
WORKERS = (0, 1, 2)


@dataclass(frozen=True)
class Priced:
    """Milliseconds of CPU time for one image, the fastest round."""

    image: str
    kib: float
    transformers: float
    cut: float
    normalise: float

    @property
    def ratio(self) -> float:
        """All of ours over the peer's."""
        return (self.cut + self.normalise) / self.transformers


def price(processor: Processor, rounds: int) -> list[Priced]:
    """Each size as PNG and JPEG."""
    found = []
    cut = processor.cut
    for width, height in SIZES:
        for kind in ("PNG", "JPEG"):
            data = picture(0, width, height, kind)
            t, h, w = processor.grids([data])[0].tolist()
            patches = np.empty(cut.size((t, h, w)), np.uint8)
            times = (
                fastest(rounds, partial(processor.pixels, [data])),
                fastest(rounds, partial(cut.patches, data, (t, h, w), patches)),
                fastest(rounds, partial(processor.normalised, torch.from_numpy(patches))),
            )
            found.append(Priced(f"{width}x{height} {kind}", len(data) / 1024, *times))
    return found


def picture(seed: int, width: int, height: int, kind: str) -> bytes:
    """A drawn page, encoded."""
    page = draw_page(seed, width, height)
    if kind == "PNG":
        return page
    buffer = io.BytesIO()
    Image.open(io.BytesIO(page)).save(buffer, kind, quality=80)
    return buffer.getvalue()


def fastest(rounds: int, work: Callable[[], Any]) -> float:
    """Milliseconds of CPU time; a first call does what is done once."""
    work()
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best * 1e3


@dataclass(frozen=True)
class Trained:
    """One way through all rows."""

    image: str
    pixels: str
    seconds: float  # wall clock, rows built and computed
    waited: float  # seconds of them, for pixels
    images: int


class Trial:
    """Rows of screenshots and a small model, in this process alone."""

    def __init__(self, folder: Path, rows: int) -> None:
        torch.set_num_threads(1)
        self.folder, self.rows, self.platform = folder, rows, platforms.use("auto")
        store = torch.distributed.FileStore(str(folder / "store"), 1)
        torch.distributed.init_process_group(self.platform.backend, store=store, rank=0, world_size=1)
        # Megatron is imported on the platform that is in use.
        from megatron_webrl.model import groups
        from megatron_webrl.model.layout import Sizes
        from megatron_webrl.model.load import load_hf
        from megatron_webrl.model.qwen3_vl import build

        self.path = make_tiny_model(folder / "model", max_pixels=LIMIT, max_position_embeddings=16384)
        groups.form(Sizes())
        self.chunks = build(self.path, dtype="float32", platform=self.platform)
        load_hf(self.chunks, self.path)
        self.processor = Processor.load(self.path)

    def close(self) -> None:
        """Leave the process group."""
        torch.distributed.destroy_process_group()

    def run(self, width: int, height: int, images: int) -> list[Trained]:
        """Rows of `images` screenshots each: with pixels that are there, then by numbers of workers."""
        samples = [self._sample(row, [picture(row * 100 + i, width, height, "PNG") for i in range(images)])
                   for row in range(self.rows)]  # fmt: skip
        name, found = f"{width}x{height} PNG, {images} a row", []
        ready = self._builder(0, samples).build(samples, "token_mean", 1)
        begun = time.perf_counter()
        self._compute(ready)
        found.append(Trained(name, "there", time.perf_counter() - begun, 0.0, images * self.rows))
        for workers in WORKERS:
            builder = self._builder(workers, samples)
            if builder.preparation is not None:  # a worker has started when its first image is there
                self._compute(builder.build(samples[:workers], "token_mean", 1))
                builder.waiting.take()
            begun = time.perf_counter()
            self._compute(builder.build(samples, "token_mean", 1))
            seconds = time.perf_counter() - begun
            way = f"{workers} worker{'s' * (workers > 1)}" if workers else "in the process"
            found.append(Trained(name, way, seconds, builder.waiting.take(), images * self.rows))
            builder.close()
        return found

    def _builder(self, workers: int, samples: Sequence[Sample]) -> RowBuilder:
        from megatron_webrl.trainer.build import with_pixels_ahead

        config = Config()
        config.run.directory, config.trainer.pixel_workers = str(self.folder), workers
        longest, cost = max(sample.length for sample in samples), Cost.of_model(describe(self.path))
        builder = RowBuilder(self.processor, longest, self.platform.device, 0, 1, cost)
        return with_pixels_ahead(builder, config, 0)

    def _sample(self, number: int, shots: list[bytes]) -> Sample:
        grids = self.processor.grids(shots)
        merged = grids.prod(axis=1) // self.processor.merge**2
        prompt = np.concatenate([np.append(np.full(n, self.processor.image_token_id), 30) for n in merged])
        response = np.full(RESPONSE, 40, np.int32)
        zeros = np.zeros(RESPONSE, np.int32)
        behaviour = zeros.astype(np.float32)
        return Sample(
            prompt.astype(np.int32), response, behaviour, zeros, tuple(shots), grids, 1.0, 1.0, 1, (number, 0)
        )

    def _compute(self, rows: Sequence[Microbatch]) -> None:
        """Forward and backward of each row."""
        from megatron_webrl.model.logprobs import vocab_parallel_logprobs

        model = self.chunks[0]
        for batch in rows:
            logprobs, _ = vocab_parallel_logprobs(model(batch.row), batch.targets, 1.0, model.unpadded_vocab_size, None)
            (logprobs * batch.weight).sum().backward()
        torch.cuda.synchronize()


def show_prices(found: Sequence[Priced]) -> None:
    """Print the first table."""
    print("| image | KiB | transformers, ms | worker, ms | left to the learner, ms | ours / transformers |")
    print("|---|" + "---:|" * 5)
    for p in found:
        print(f"| {p.image} | {p.kib:.0f} | {p.transformers:.2f} | {p.cut:.2f} | {p.normalise:.2f} | {p.ratio:.2f} |")


def show_trials(found: Sequence[Trained]) -> None:
    """Print the second table; hidden: of what the process itself takes for the pixels."""
    print("\n| rows of | pixels | s | / pixels that are there | s waiting | ms an image | hidden |")
    print("|---|---|" + "---:|" * 5)
    for t in found:
        there, alone = (
            next(o for o in found if o.image == t.image and o.pixels == w) for w in ("there", "in the process")
        )
        hidden = "" if t.pixels == "there" else f"{1 - t.waited / alone.waited:.0%}"
        each = f"{t.waited:.3f} | {t.waited / t.images * 1e3:.2f}"
        print(f"| {t.image} | {t.pixels} | {t.seconds:.2f} | {t.seconds / there.seconds:.3f} | {each} | {hidden} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {machine.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as temporary:
        trial = Trial(Path(temporary), 4 if arguments.quick else 12)
        prices = price(trial.processor, 3 if arguments.quick else 15)
        show_prices(prices)
        trials = [*trial.run(160, 224, 8), *trial.run(1280, 720, 1)]
        trial.close()
    show_trials(trials)
    if arguments.json:
        figures = {
            "load": os.getloadavg()[0],
            "images": [asdict(p) | {"ratio": p.ratio} for p in prices],
            "rows": [asdict(t) for t in trials],
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
