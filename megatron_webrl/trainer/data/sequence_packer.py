"""Packed rows as tensors: what one forward pass of the model takes, and the response tokens that it scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_webrl.model.processor import Processor
from megatron_webrl.model.qwen3_vl.packed_input import PackedInput, partition_images, token_range
from megatron_webrl.model.qwen3_vl.rope import mrope_position_ids
from megatron_webrl.trainer.data.batching import TrainingSample, token_weights
from megatron_webrl.trainer.data.flops import FlopsEstimator, sequence_images, unique_images
from megatron_webrl.trainer.data.merging import MergedSequence, merge_prefixes, unmerged_sequence
from megatron_webrl.trainer.data.packing import PackedSequence, pack_sequences
from megatron_webrl.trainer.images.image_cache import ImageCache
from megatron_webrl.trainer.images.image_prefetcher import (
    ImagePrefetcher,
    ImagePreparationError,
    PrefetchedPixels,
    WaitTimer,
)

NON_IMAGE_TOKEN = -1
"""Stands for response tokens where images are looked for: a response may hold the placeholder, and there it is text."""


ImageWithGrid = tuple[bytes, tuple[int, int, int]]
"""Encoded, and the grid that the engine used."""


class ImageGridMismatch(ValueError):
    """The trainer's image grid differs from the engine's: training on it would be silently wrong."""


@dataclass(frozen=True)
class Microbatch:
    """One row and the response tokens that this rank scores: context-parallel ranks share them out.

    Tensors [tokens] go by sample in the row, then by position.
    """

    inputs: PackedInput
    targets: torch.Tensor  # int64 [tokens]
    behaviour_logprobs: torch.Tensor  # float32 [tokens]
    versions: torch.Tensor  # int32 [tokens]
    advantage: torch.Tensor  # float32 [tokens]
    weight: torch.Tensor  # float32 [tokens]
    step_index: torch.Tensor  # int64 [tokens], which of the row's steps a token is of
    step_lengths: (
        torch.Tensor
    )  # float32 [steps], response tokens of each step of the row, those of other ranks included
    temperature: float
    token_count: int  # of the row, prompts included; 0 for a row that stands in, or that another rank counts


@dataclass(frozen=True)
class _PlannedRow:
    chains: Sequence[MergedSequence]
    values: Sequence[float]  # the token weight of each step


_Plan = Sequence[Sequence[_PlannedRow]]
"""The rows of each replica."""


@dataclass(frozen=True)
class SequencePacker:
    """Makes this rank's rows of a minibatch.

    All ranks of a replica make the same rows, but for the pixels: tensor-parallel ranks share the images of a row
    out, and ranks that have no vision tower make no pixels. With a `preparation` the pixels of a row are made ahead of
    its forward pass; without, all are made at once. `waiting` counts how long that held the rank up.
    """

    processor: Processor
    max_tokens: int  # tokens of a row
    device: torch.device
    data_parallel_rank: int  # this rank's place among the data-parallel replicas
    data_parallel_size: int
    flops_estimator: FlopsEstimator
    microbatch_multiple: int = 1  # of which the number of a replica's rows must be one
    merge_prefixes: bool = True  # compute steps that go on from each other as one sequence
    encodes_images: bool = True  # whether this rank encodes images
    image_rank: int = 0  # this rank's place among those that share a row's images out
    num_image_ranks: int = 1
    context_parallel_rank: int = 0  # this rank's place among those that share a row's tokens out
    context_parallel_size: int = 1
    token_multiple: int = 1  # of which the number of tokens of a context-parallel rank is one
    prefetcher: ImagePrefetcher | None = None
    image_cache: ImageCache | None = None  # where samples name their screenshots: who has them
    wait_timer: WaitTimer = field(default_factory=WaitTimer)

    def build(self, samples: Sequence[TrainingSample], normaliser: str, k: int, passes: int = 1) -> list[Microbatch]:
        """The rows of this replica, weighted so that all replicas' rows together make the objective.

        `passes`: how often the rows will be computed, in this order, those of other calls in between.
        See build_all.
        """
        return self.build_all([samples], normaliser, k, passes)[0]

    def build_all(
        self, parts: Sequence[Sequence[TrainingSample]], normaliser: str, k: int, passes: int = 1
    ) -> list[list[Microbatch]]:
        """The same of several minibatches. With a `shelf` collective over all ranks.

        Every replica gets as many rows as the others (see packing.replica_rows). A row that no sample is left for
        holds the shortest one at weight zero: every replica must take part in every pass.
        Raises InputMismatch; PixelError; ValueError for a sample that is longer than a row.
        """
        # One after the other: pixels of the first rows are under way while the next minibatch is planned.
        plans: Iterable[_Plan] = (self._plan(samples, normaliser, k) for samples in parts)
        if self.image_cache is not None:
            plans = list(plans)
            self.image_cache.transfer_stats += self.image_cache.fetch(self._wanted(self.image_cache, plans))
        return [[self._row(row.chains, row.values, passes) for row in plan[self.data_parallel_rank]] for plan in plans]

    def _plan(self, samples: Sequence[TrainingSample], normaliser: str, k: int) -> _Plan:
        """The rows of all replicas."""
        chains = (
            merge_prefixes(samples, self._placeholders)
            if self.merge_prefixes
            else [unmerged_sequence(sample) for sample in samples]
        )
        flat = iter(token_weights([step for chain in chains for step in chain.samples], normaliser, k))
        values = [[next(flat) for _ in chain.samples] for chain in chains]
        spare = _PlannedRow([unmerged_sequence(min(samples, key=lambda sample: sample.length))], [0.0])
        sites = None if self.image_cache is None else self.image_cache.replica_nodes

        def planned(row: PackedSequence) -> _PlannedRow:
            return _PlannedRow([chains[i] for i in row], [value for i in row for value in values[i]])

        plan = pack_sequences(
            chains, self.flops_estimator, self.max_tokens, self.data_parallel_size, self.microbatch_multiple, sites
        )
        return [[planned(row) if row else spare for row in rows] for rows in plan]

    def _wanted(self, shelf: ImageCache, plans: Sequence[_Plan]) -> dict[int, list[bytes]]:
        """Rank -> names of the screenshots that it encodes."""
        wanted: dict[int, list[bytes]] = {}
        for replica in range(self.data_parallel_size):
            ranks = shelf.image_ranks_of(replica)
            for row in (row for plan in plans for row in plan[replica]):
                unique = unique_images(row.chains)
                for share, indices in enumerate(partition_images([grid for _, grid in unique], self.num_image_ranks)):
                    wanted.setdefault(ranks[share], []).extend(unique[i][0] for i in indices)
        return wanted

    def prefetch(self, samples: Sequence[TrainingSample]) -> None:
        """Begin with the pixels of samples that will be built into rows, if they will be this rank's."""
        if (
            self.prefetcher is None
            or self.image_cache is not None
            or self.data_parallel_size * self.num_image_ranks > 1
        ):
            return
        for sample in samples:
            ticket, index = sample.trajectory_id
            grids = [(t, h, w) for t, h, w in sample.grids.tolist()]
            self.prefetcher.prefetch(zip(sample.images, grids, strict=True), f"ticket {ticket}, episode {index}")

    def close(self) -> None:
        """End what makes pixels ahead."""
        if self.prefetcher is not None:
            self.prefetcher.close()

    @property
    def _placeholders(self) -> tuple[int, int]:
        """Tokens that stand for an image or a video."""
        video = self.processor.tokenizer.convert_tokens_to_ids("<|video_pad|>")
        return self.processor.image_token_id, int(video)

    def _row(self, chains: Sequence[MergedSequence], values: Sequence[float], passes: int) -> Microbatch:
        """`values`: the token weight of each step."""
        starts = np.concatenate([[0], np.cumsum([chain.length for chain in chains])])
        placed = list(zip(starts[:-1], chains, strict=True))
        tokens = np.concatenate([chain.tokens for chain in chains]).astype(np.int64)
        scored = np.concatenate([start + chain.response_positions for start, chain in placed])
        content = tokens.copy()
        content[scored] = NON_IMAGE_TOKEN
        steps = [step for chain in chains for step in chain.samples]
        counts = [len(step.response) for step in steps]

        # The logits at position i score the token at i + 1.
        share = token_range(len(tokens), self.context_parallel_rank, self.context_parallel_size, self.token_multiple)
        mine = (scored > share.start) & (scored <= share.stop)

        def per_token(numbers: Sequence[float]) -> torch.Tensor:
            return self._tensor(np.repeat(numbers, counts)[mine].astype(np.float32))

        counts_here = self.context_parallel_rank == 0 and any(values)
        return Microbatch(
            inputs=self._packed(chains, starts, tokens, content, scored[mine] - 1, passes),
            targets=self._tensor(tokens[scored[mine]]),
            behaviour_logprobs=self._tensor(
                np.concatenate([step.behaviour_logprobs for step in steps])[mine].astype(np.float32)
            ),
            versions=self._tensor(np.concatenate([step.versions for step in steps])[mine].astype(np.int32)),
            advantage=per_token([step.advantage for step in steps]),
            weight=per_token(values),
            step_index=self._tensor(np.repeat(np.arange(len(steps)), counts)[mine]),
            step_lengths=self._tensor(np.array(counts, np.float32)),
            temperature=chains[0].temperature,
            token_count=len(tokens) if counts_here else 0,
        )

    def _packed(
        self,
        chains: Sequence[MergedSequence],
        starts: np.ndarray,
        tokens: np.ndarray,
        content: np.ndarray,
        predict: np.ndarray,
        passes: int,
    ) -> PackedInput:
        unique = unique_images(chains)
        place = {image: index for index, image in enumerate(unique)}
        grids = np.array([grid for _, grid in unique], np.int64).reshape(-1, 3)
        encoded = partition_images(grids.tolist(), self.num_image_ranks)[self.image_rank] if self.encodes_images else []
        owners = {image: chain.samples[0].trajectory_id for chain in reversed(chains) for image in chain.images}
        names = {image: f"ticket {ticket}, episode {index}" for image, (ticket, index) in owners.items()}
        return PackedInput(
            tokens=self._tensor(tokens),
            position_ids=torch.cat(
                [
                    self._positions(chain, content[start : start + chain.length])
                    for start, chain in zip(starts[:-1], chains, strict=True)
                ],
                dim=1,
            ).to(self.device),
            cu_seqlens=self._tensor(starts.astype(np.int32)),
            pixels=self._pixels([unique[i] for i in encoded], names, passes),
            grids=self._tensor(grids),
            scored_positions=self._tensor(predict),
            image_indices=self._tensor(
                np.array([place[image] for chain in chains for image in sequence_images(chain)], dtype=np.int64)
            ),
            local_images=self._tensor(np.array(encoded, dtype=np.int64)),
            image_token_positions=self._tensor(np.flatnonzero(content == self.processor.image_token_id)),
        )

    def _positions(self, chain: MergedSequence, content: np.ndarray) -> torch.Tensor:
        """m-RoPE positions of one chain, int64 [3, tokens]."""
        grids = torch.from_numpy(chain.grids.astype(np.int64))
        return mrope_position_ids(
            torch.from_numpy(content), grids, self.processor.image_token_id, self.processor.merge_size
        )

    def _pixels(
        self, images: Sequence[ImageWithGrid], names: Mapping[bytes, str], passes: int
    ) -> torch.Tensor | PrefetchedPixels:
        """Patches of encoded images, float32 [patches, dim], checked against the grids that the engine used.

        `names`: the episode of each image.
        """
        if self.image_cache is not None:
            names = {self.image_cache.get(image): names[image] for image, _ in images}
            images = [(self.image_cache.get(image), grid) for image, grid in images]
        for image, grid in images:
            try:
                made = tuple(self.processor.grids([image])[0].tolist())
            except ValueError as error:
                raise ImagePreparationError(f"a screenshot of {names[image]} cannot be trained on: {error}") from error
            if made != grid:
                raise ImageGridMismatch(
                    f"image grids differ for a screenshot of {names[image]}: the engine used {list(grid)}, the trainer "
                    f"makes {list(made)}"
                )
        if self.prefetcher is not None and images:
            return self.prefetcher.schedule(images, names, passes)
        with self.wait_timer.measure():
            pixels, _ = self.processor.pixels([data for data, _ in images])
        return pixels.to(self.device)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
