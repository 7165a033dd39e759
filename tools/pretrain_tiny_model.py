"""Teach a tiny Qwen3-VL to answer as demonstrations do, so that a laptop has something to begin RL with.

    python -m tools.pretrain_tiny_model MODEL DEMONSTRATIONS... OUT [--steps N] [--last-steps N] [--threads N]

MODEL is a folder of make_tiny_model, DEMONSTRATIONS are files of `webrl demonstrate`; a file that is named twice counts
twice. transformers trains on one machine, in float32. Beside the likelihood of the answers, two small heads, thrown
away at the end, are asked where in the last image the answer clicks: which of its cells, and where in it. Without them
a model of this size takes far longer to look at the image at all.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.model.patchifier import Patchifier
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.types import COORDINATE_RANGE
from megatron_webrl.util import torchvision_shim

BATCH = 16
PART = 4  # samples of a forward pass
LEARNING_RATE = 2e-3
WARMUP = 0.03  # share of all steps
JITTER = 0.1  # standard deviation of noise on pixels
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class DemonstrationSample:
    """A step of a demonstration."""

    prompt: torch.Tensor  # int64 [tokens]
    response: torch.Tensor  # int64 [tokens]
    patches: torch.Tensor  # uint8 [patches of all its images, bytes of a patch]
    grids: torch.Tensor  # int64 [images, 3], the last one is what the answer acts on
    click: tuple[float, float] | None  # x, y of the click, shares of the image


def image_patches(processor: Processor, cut: Patchifier, image: bytes) -> torch.Tensor:
    """Its patches in bytes, of which `Processor.normalize_patches` makes pixels: uint8 [patches, bytes of a patch]."""
    _, rows, columns = processor.grids([image])[0].tolist()
    out = torch.empty(rows * columns, cut.patch_bytes, dtype=torch.uint8)
    cut.patchify(image, (1, rows, columns), out.numpy())
    return out


def read_samples(path: Path, processor: Processor, last_steps: int = 1) -> list[DemonstrationSample]:
    """All steps of a file of demonstrations, the last one of each `last_steps` times. Raises RecordError, OSError."""
    samples, cut = [], processor.patchifier
    for record in read_record_file(path):
        trajectory = decode_trajectory(record, copy=True)
        patches = [image_patches(processor, cut, image) for image in trajectory.images]
        for step in trajectory.steps:
            place = step.action.coordinate if step.action else None
            sample = DemonstrationSample(
                prompt=torch.from_numpy(step.prompt_token_ids.astype(np.int64)),
                response=torch.from_numpy(step.response_token_ids.astype(np.int64)),
                patches=torch.cat([patches[index] for index in step.images]),
                grids=torch.from_numpy(step.image_grids.astype(np.int64)),
                click=None if place is None else (place[0] / COORDINATE_RANGE, place[1] / COORDINATE_RANGE),
            )
            samples += [sample] * (last_steps if step is trajectory.steps[-1] else 1)
    return samples


class ClickHeads(torch.nn.Module):
    """Where the answer clicks, from the hidden states [cells, width] of the last image's cells."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = torch.nn.Linear(width, 1)
        self.within = torch.nn.Linear(width, 2)

    def forward(self, cells: torch.Tensor, rows: int, columns: int, place: tuple[float, float]) -> torch.Tensor:
        """Cross-entropy of the cell that holds `place`, plus the squared distance within it, in cells."""
        x, y = min(place[0] * columns, columns - 1e-3), min(place[1] * rows, rows - 1e-3)
        wanted = int(y) * columns + int(x)
        inside = torch.tensor([x - int(x), y - int(y)])
        chosen = torch.nn.functional.cross_entropy(self.cell(cells).T, torch.tensor([wanted]))
        return chosen + (self.within(cells[wanted]) - inside).square().sum()


def compute_loss(
    model: Any, heads: ClickHeads, samples: Sequence[DemonstrationSample], processor: Processor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the samples: negative log-likelihood of the answers' tokens, and the loss of the heads."""
    rows = [torch.cat([sample.prompt, sample.response]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        mask[number, : len(row)] = 1
    pixels, merge = processor.normalize_patches(torch.cat([sample.patches for sample in samples])), processor.merge_size
    images = (ids == processor.image_token_id) & mask.bool()
    hidden = model.model(
        input_ids=ids,
        attention_mask=mask,
        mm_token_type_ids=images.int(),
        pixel_values=pixels + JITTER * torch.randn_like(pixels),
        image_grid_thw=torch.cat([sample.grids for sample in samples]),
        use_cache=False,
    ).last_hidden_state
    likelihood, located = torch.zeros(()), torch.zeros(())
    for number, sample in enumerate(samples):
        first = len(sample.prompt) - 1
        logits = model.lm_head(hidden[number, first : first + len(sample.response)])
        likelihood = likelihood + torch.nn.functional.cross_entropy(logits, sample.response, reduction="sum")
        if sample.click is not None:
            _, high, wide = (int(value) for value in sample.grids[-1])
            cells = hidden[number, images[number]][-(high * wide // merge**2) :]
            located = located + heads(cells, high // merge, wide // merge, sample.click)
    return likelihood, located


def sample_length(sample: DemonstrationSample) -> int:
    """Tokens."""
    return len(sample.prompt) + len(sample.response)


def pretrain(
    model: Any, samples: Sequence[DemonstrationSample], steps: int, processor: Processor, seed: int
) -> Iterator[float]:
    """Train in place; yields the answers' loss after each step."""
    torch.manual_seed(seed)
    heads = ClickHeads(model.config.text_config.hidden_size)
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    warmup = max(1, int(WARMUP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))) * 0.98 + 0.02),
    )
    order: list[int] = []
    shuffle = random.Random(seed)
    model.train()
    for _ in range(steps):
        if len(order) < BATCH:
            order += shuffle.sample(range(len(samples)), len(samples))
        batch, order = sorted((samples[index] for index in order[:BATCH]), key=sample_length), order[BATCH:]
        tokens, answers = sum(len(sample.response) for sample in batch), 0.0
        optimizer.zero_grad()
        for first in range(0, BATCH, PART):  # by length: little padding
            likelihood, located = compute_loss(model, heads, batch[first : first + PART], processor)
            (likelihood / tokens * 4 + located / BATCH).backward()
            answers += float(likelihood.detach()) / tokens
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        yield answers


def load_model(folder: Path) -> Any:
    """The model of a folder, in float32. Raises OSError."""
    torchvision_shim.install()
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )


def save_model(model: Any, source: Path, out: Path) -> None:
    """Write the folder anew with the model's weights in bfloat16, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        made = Path(temporary) / "model"
        shutil.copytree(source, made)
        model.to(torch.bfloat16).save_pretrained(made)
        (made / WEIGHTS_FILE).chmod(0o644)  # written for its owner alone otherwise
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("demonstrations", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3000, metavar="N", help=f"of {BATCH} samples each (default: 3000)")
    parser.add_argument(
        "--last-steps", type=int, default=1, metavar="N",
        help="count the last step of an episode, often its hardest, N times (default: 1)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of the processor (default: 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        processor = Processor.load(str(options.model))
        samples = [
            sample for path in options.demonstrations for sample in read_samples(path, processor, options.last_steps)
        ]
        model = load_model(options.model)
    except (OSError, ValueError, RecordError) as error:
        sys.exit(f"pretrain_tiny_model: {error}")
    if len(samples) < BATCH:
        files = ", ".join(map(str, options.demonstrations))
        sys.exit(f"pretrain_tiny_model: {files}: {len(samples)} steps, fewer than a batch of {BATCH}")
    recent: list[float] = []
    for step, loss in enumerate(pretrain(model, samples, options.steps, processor, options.seed), start=1):
        recent = [*recent[-49:], loss]
        if step % 100 == 0:
            print(f"step {step} of {options.steps}: loss {sum(recent) / len(recent):.3f}", flush=True)
    save_model(model, options.model, options.out)
    print(f"{options.out}: loss of the answers {sum(recent) / len(recent):.3f} per token")


if __name__ == "__main__":
    main()
