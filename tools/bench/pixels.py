"""Cost of preprocessing screenshots for training, and the part of it that image threads hide.

1. CPU milliseconds of one thread per image: transformers' image processor, compared with the part of an image thread
   (decode, resize, patchify) and the part of the learner (normalise the patches).
2. Packed sequences of screenshots through a small real model, forward and backward: with preprocessing by the
   main thread, by one and two image threads, and with images that are preprocessed before.

    python -m tools.bench.pixels [--quick] [--json FILE]
"""

from __future__ import annotations

import io
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

from megatron_webrl.config.schema import Config
from megatron_webrl.model import platform as platforms
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import Microbatch, SequencePacker
from tools.arguments import make_bench_parser, write_json
from tools.bench.screenshots import draw_page
from tools.make_tiny_model import make_tiny_model

SIZES = ((1280, 720), (1280, 768), (160, 224))
"""Pixels. Only images of 1280x720 must be resized: 720 is no multiple of 32."""
MAX_PIXELS = 2**24
"""Largest image that the image processor does not scale down."""
RESPONSE_TOKENS = 16
WORKERS = (0, 1, 2)


@dataclass(frozen=True)
class ImageCost:
    """CPU milliseconds per image, fastest round."""

    image: str
    kib: float
    transformers: float
    patches: float
    normalise: float

    @property
    def ratio(self) -> float:
        """Thread and learner / transformers."""
        return (self.patches + self.normalise) / self.transformers


def measure_image_costs(processor: Processor, rounds: int) -> list[ImageCost]:
    """Measure each size as PNG and JPEG."""
    found = []
    cut = processor.patchifier
    for width, height in SIZES:
        for kind in ("PNG", "JPEG"):
            data = draw_screenshot(0, width, height, kind)
            t, h, w = processor.grids([data])[0].tolist()
            patches = np.empty(cut.image_bytes((t, h, w)), np.uint8)
            times = (
                fastest_cpu_ms(rounds, partial(processor.pixels, [data])),
                fastest_cpu_ms(rounds, partial(cut.patchify, data, (t, h, w), patches)),
                fastest_cpu_ms(rounds, partial(processor.normalize_patches, torch.from_numpy(patches))),
            )
            found.append(ImageCost(f"{width}x{height} {kind}", len(data) / 1024, *times))
    return found


def draw_screenshot(seed: int, width: int, height: int, kind: str) -> bytes:
    """A drawn page as encoded image."""
    page = draw_page(seed, width, height)
    if kind == "PNG":
        return page
    buffer = io.BytesIO()
    Image.open(io.BytesIO(page)).save(buffer, kind, quality=80)
    return buffer.getvalue()


def fastest_cpu_ms(rounds: int, work: Callable[[], Any]) -> float:
    """CPU milliseconds of the fastest of `rounds` calls, after a first call."""
    work()
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best * 1e3


@dataclass(frozen=True)
class PreprocessingResult:
    """One pass over all packed sequences."""

    image: str
    pixels: str
    seconds: float  # wall time of packing and computing
    waited: float  # seconds of waiting for images
    images: int


class PreprocessingBench:
    """Packed sequences of screenshots and a small model in this process."""

    def __init__(self, folder: Path, rows: int) -> None:
        torch.set_num_threads(1)
        self.folder, self.rows, self.platform = folder, rows, platforms.activate("auto")
        store = torch.distributed.FileStore(str(folder / "store"), 1)
        torch.distributed.init_process_group(self.platform.backend, store=store, rank=0, world_size=1)
        # Import Megatron after the platform is active.
        from megatron_webrl.model import process_groups
        from megatron_webrl.model.build import build_model, load_hf
        from megatron_webrl.model.layout import ParallelSizes

        self.path = make_tiny_model(folder / "model", max_pixels=MAX_PIXELS, max_position_embeddings=16384)
        process_groups.init_process_groups(ParallelSizes())
        self.chunks = build_model(self.path, dtype="float32", platform=self.platform)
        load_hf(self.chunks, self.path)
        self.processor = Processor.load(self.path)

    def close(self) -> None:
        """Destroy the process group."""
        torch.distributed.destroy_process_group()

    def run(self, width: int, height: int, images: int) -> list[PreprocessingResult]:
        """Measure sequences of `images` screenshots: images prepared before, then each number of image threads."""
        samples = [self._sample(row, [draw_screenshot(row * 100 + i, width, height, "PNG") for i in range(images)])
                   for row in range(self.rows)]  # fmt: skip
        name, found = f"{width}x{height} PNG, {images} per sequence", []
        ready = self._builder(0, samples).build(samples, "token_mean", 1)
        begun = time.perf_counter()
        self._compute(ready)
        found.append(PreprocessingResult(name, "prepared", time.perf_counter() - begun, 0.0, images * self.rows))
        for workers in WORKERS:
            builder = self._builder(workers, samples)
            if builder.prefetcher is not None:  # the first image of a thread takes longer
                self._compute(builder.build(samples[:workers], "token_mean", 1))
                builder.wait_timer.pop_seconds()
            begun = time.perf_counter()
            self._compute(builder.build(samples, "token_mean", 1))
            seconds = time.perf_counter() - begun
            way = f"{workers} thread{'s' * (workers > 1)}" if workers else "in the process"
            found.append(PreprocessingResult(name, way, seconds, builder.wait_timer.pop_seconds(), images * self.rows))
            builder.close()
        return found

    def _builder(self, workers: int, samples: Sequence[TrainingSample]) -> SequencePacker:
        from megatron_webrl.trainer.images import WaitTimer
        from megatron_webrl.trainer.main import make_image_prefetcher

        config = Config()
        config.run.directory, config.trainer.image_workers = str(self.folder), workers
        longest, cost = (
            max(sample.length for sample in samples),
            FlopsEstimator.from_hf_config(load_hf_config(self.path)),
        )
        timer, device = WaitTimer(), self.platform.device
        prefetcher = make_image_prefetcher(config, self.processor, device, timer)
        return SequencePacker(self.processor, longest, device, 0, 1, cost, prefetcher=prefetcher, wait_timer=timer)

    def _sample(self, number: int, shots: list[bytes]) -> TrainingSample:
        grids = self.processor.grids(shots)
        merged = grids.prod(axis=1) // self.processor.merge_size**2
        prompt = np.concatenate([np.append(np.full(n, self.processor.image_token_id), 30) for n in merged])
        response = np.full(RESPONSE_TOKENS, 40, np.int32)
        zeros = np.zeros(RESPONSE_TOKENS, np.int32)
        behaviour = zeros.astype(np.float32)
        return TrainingSample(
            prompt.astype(np.int32), response, behaviour, zeros, tuple(shots), grids, 1.0, 1.0, 1, (number, 0)
        )

    def _compute(self, rows: Sequence[Microbatch]) -> None:
        """Forward and backward pass of each packed sequence."""
        from megatron_webrl.model.logprobs import vocab_parallel_logprobs

        model = self.chunks[0]
        for batch in rows:
            logprobs, _ = vocab_parallel_logprobs(
                model(batch.inputs), batch.targets, 1.0, model.unpadded_vocab_size, None
            )
            (logprobs * batch.weight).sum().backward()
        torch.cuda.synchronize()


def show_image_costs(found: Sequence[ImageCost]) -> None:
    """Print the first table."""
    print("| image | KiB | transformers, ms | thread, ms | learner, ms | ours / transformers |")
    print("|---|" + "---:|" * 5)
    for p in found:
        print(
            f"| {p.image} | {p.kib:.0f} | {p.transformers:.2f} | {p.patches:.2f} | {p.normalise:.2f} | {p.ratio:.2f} |"
        )


def show_results(found: Sequence[PreprocessingResult]) -> None:
    """Print the second table; hidden: relative to preprocessing in the process."""
    print("\n| sequences of | preprocessing | s | / prepared | s waiting | ms per image | hidden |")
    print("|---|---|" + "---:|" * 5)
    for t in found:
        prepared, alone = (
            next(o for o in found if o.image == t.image and o.pixels == w) for w in ("prepared", "in the process")
        )
        hidden = "" if t.pixels == "prepared" else f"{1 - t.waited / alone.waited:.0%}"
        each = f"{t.waited:.3f} | {t.waited / t.images * 1e3:.2f}"
        print(f"| {t.image} | {t.pixels} | {t.seconds:.2f} | {t.seconds / prepared.seconds:.3f} | {each} | {hidden} |")


def main() -> None:
    parser = make_bench_parser(__doc__, "fewer rounds and sequences")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {machine.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as temporary:
        bench = PreprocessingBench(Path(temporary), 4 if arguments.quick else 12)
        costs = measure_image_costs(bench.processor, 3 if arguments.quick else 15)
        show_image_costs(costs)
        results = [*bench.run(160, 224, 8), *bench.run(1280, 720, 1)]
        bench.close()
    show_results(results)
    if arguments.json:
        figures = {
            "load": os.getloadavg()[0],
            "images": [asdict(p) | {"ratio": p.ratio} for p in costs],
            "rows": [asdict(t) for t in results],
        }
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
