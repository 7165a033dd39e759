"""Packed rows as tensors: what one forward pass of the model takes, and the response tokens that it scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_webrl.model.inputs import PackedRow, image_shares, token_share
from megatron_webrl.model.processing import Processor
from megatron_webrl.model.rope import mrope_positions
from megatron_webrl.trainer.batching import Sample, weights
from megatron_webrl.trainer.cost import Cost, distinct_images, images_of
from megatron_webrl.trainer.merging import Chain, merge, single
from megatron_webrl.trainer.packing import Row, replica_rows
from megatron_webrl.trainer.preparation import PixelError, Preparation, RowPixels, Waiting
from megatron_webrl.trainer.shelf import Shelf

NO_IMAGE = -1
"""Stands for response tokens where images are looked for: a response may hold the placeholder, and there it is text."""


Image = tuple[bytes, tuple[int, int, int]]
"""Encoded, and the grid that the engine used."""


class InputMismatch(ValueError):
    """The trainer's image grid differs from the engine's: training on it would be silently wrong."""


@dataclass(frozen=True)
class Microbatch:
    """One row and the response tokens that this rank scores: context-parallel ranks share them out.

    Tensors [tokens] go by sample in the row, then by position.
    """

    row: PackedRow
    targets: torch.Tensor  # int64 [tokens]
    behaviour: torch.Tensor  # float32 [tokens]
    versions: torch.Tensor  # int32 [tokens]
    advantage: torch.Tensor  # float32 [tokens]
    weight: torch.Tensor  # float32 [tokens]
    step: torch.Tensor  # int64 [tokens], which of the row's steps a token is of
    lengths: torch.Tensor  # float32 [steps], response tokens of each step of the row, those of other ranks included
    temperature: float
    tokens: int  # of the row, prompts included; 0 for a row that stands in, or that another rank counts


@dataclass(frozen=True)
class _PlannedRow:
    chains: Sequence[Chain]
    values: Sequence[float]  # the token weight of each step


_Plan = Sequence[Sequence[_PlannedRow]]
"""The rows of each replica."""


@dataclass(frozen=True)
class RowBuilder:
    """Makes this rank's rows of a minibatch.

    All ranks of a replica make the same rows, but for the pixels: tensor-parallel ranks share the images of a row
    out, and ranks that have no vision tower make no pixels. With a `preparation` the pixels of a row are made ahead of
    its forward pass; without, all are made at once. `waiting` counts how long that held the rank up.
    """

    processor: Processor
    limit: int  # tokens of a row
    device: torch.device
    replica: int  # this rank's place among the data-parallel replicas
    replicas: int
    cost: Cost
    multiple: int = 1  # of which the number of a replica's rows must be one
    merge: bool = True  # compute steps that go on from each other as one sequence
    pixels: bool = True  # whether this rank encodes images
    image_rank: int = 0  # this rank's place among those that share a row's images out
    image_ranks: int = 1
    context_rank: int = 0  # this rank's place among those that share a row's tokens out
    context_ranks: int = 1
    token_multiple: int = 1  # of which the number of tokens of a context-parallel rank is one
    preparation: Preparation | None = None
    shelf: Shelf | None = None  # where samples name their screenshots: who has them
    waiting: Waiting = field(default_factory=Waiting)

    def build(self, samples: Sequence[Sample], normaliser: str, k: int, passes: int = 1) -> list[Microbatch]:
        """The rows of this replica, weighted so that all replicas' rows together make the objective.

        `passes`: how often the rows will be computed, in this order, those of other calls in between.
        See build_all.
        """
        return self.build_all([samples], normaliser, k, passes)[0]

    def build_all(
        self, parts: Sequence[Sequence[Sample]], normaliser: str, k: int, passes: int = 1
    ) -> list[list[Microbatch]]:
        """The same of several minibatches. With a `shelf` collective over all ranks.

        Every replica gets as many rows as the others (see packing.replica_rows). A row that no sample is left for
        holds the shortest one at weight zero: every replica must take part in every pass.
        Raises InputMismatch; PixelError; ValueError for a sample that is longer than a row.
        """
        # One after the other: pixels of the first rows are under way while the next minibatch is planned.
        plans: Iterable[_Plan] = (self._plan(samples, normaliser, k) for samples in parts)
        if self.shelf is not None:
            plans = list(plans)
            self.shelf.trained += self.shelf.bring(self._wanted(self.shelf, plans))
        return [[self._row(row.chains, row.values, passes) for row in plan[self.replica]] for plan in plans]

    def _plan(self, samples: Sequence[Sample], normaliser: str, k: int) -> _Plan:
        """The rows of all replicas."""
        chains = merge(samples, self._placeholders) if self.merge else [single(sample) for sample in samples]
        flat = iter(weights([step for chain in chains for step in chain.steps], normaliser, k))
        values = [[next(flat) for _ in chain.steps] for chain in chains]
        spare = _PlannedRow([single(min(samples, key=lambda sample: sample.length))], [0.0])
        sites = None if self.shelf is None else self.shelf.sites

        def planned(row: Row) -> _PlannedRow:
            return _PlannedRow([chains[i] for i in row], [value for i in row for value in values[i]])

        plan = replica_rows(chains, self.cost, self.limit, self.replicas, self.multiple, sites)
        return [[planned(row) if row else spare for row in rows] for rows in plan]

    def _wanted(self, shelf: Shelf, plans: Sequence[_Plan]) -> dict[int, list[bytes]]:
        """Rank -> names of the screenshots that it encodes."""
        wanted: dict[int, list[bytes]] = {}
        for replica in range(self.replicas):
            ranks = shelf.ranks_of(replica)
            for row in (row for plan in plans for row in plan[replica]):
                unique = distinct_images(row.chains)
                for share, indices in enumerate(image_shares([grid for _, grid in unique], self.image_ranks)):
                    wanted.setdefault(ranks[share], []).extend(unique[i][0] for i in indices)
        return wanted

    def foresee(self, samples: Sequence[Sample]) -> None:
        """Begin with the pixels of samples that will be built into rows, if they will be this rank's."""
        if self.preparation is None or self.shelf is not None or self.replicas * self.image_ranks > 1:
            return
        for sample in samples:
            ticket, index = sample.trajectory
            grids = [(t, h, w) for t, h, w in sample.grids.tolist()]
            self.preparation.ahead(zip(sample.images, grids, strict=True), f"ticket {ticket}, episode {index}")

    def close(self) -> None:
        """End what makes pixels ahead."""
        if self.preparation is not None:
            self.preparation.close()

    @property
    def _placeholders(self) -> tuple[int, int]:
        """Tokens that stand for an image or a video."""
        video = self.processor.tokenizer.convert_tokens_to_ids("<|video_pad|>")
        return self.processor.image_token_id, int(video)

    def _row(self, chains: Sequence[Chain], values: Sequence[float], passes: int) -> Microbatch:
        """`values`: the token weight of each step."""
        starts = np.concatenate([[0], np.cumsum([chain.length for chain in chains])])
        placed = list(zip(starts[:-1], chains, strict=True))
        tokens = np.concatenate([chain.tokens for chain in chains]).astype(np.int64)
        scored = np.concatenate([start + chain.scored for start, chain in placed])
        content = tokens.copy()
        content[scored] = NO_IMAGE
        steps = [step for chain in chains for step in chain.steps]
        counts = [len(step.response) for step in steps]

        # The logits at position i score the token at i + 1.
        share = token_share(len(tokens), self.context_rank, self.context_ranks, self.token_multiple)
        mine = (scored > share.start) & (scored <= share.stop)

        def per_token(numbers: Sequence[float]) -> torch.Tensor:
            return self._tensor(np.repeat(numbers, counts)[mine].astype(np.float32))

        counts_here = self.context_rank == 0 and any(values)
        return Microbatch(
            row=self._packed(chains, starts, tokens, content, scored[mine] - 1, passes),
            targets=self._tensor(tokens[scored[mine]]),
            behaviour=self._tensor(np.concatenate([step.behaviour for step in steps])[mine].astype(np.float32)),
            versions=self._tensor(np.concatenate([step.versions for step in steps])[mine].astype(np.int32)),
            advantage=per_token([step.advantage for step in steps]),
            weight=per_token(values),
            step=self._tensor(np.repeat(np.arange(len(steps)), counts)[mine]),
            lengths=self._tensor(np.array(counts, np.float32)),
            temperature=chains[0].temperature,
            tokens=len(tokens) if counts_here else 0,
        )

    def _packed(
        self,
        chains: Sequence[Chain],
        starts: np.ndarray,
        tokens: np.ndarray,
        content: np.ndarray,
        predict: np.ndarray,
        passes: int,
    ) -> PackedRow:
        unique = distinct_images(chains)
        place = {image: index for index, image in enumerate(unique)}
        grids = np.array([grid for _, grid in unique], np.int64).reshape(-1, 3)
        encoded = image_shares(grids.tolist(), self.image_ranks)[self.image_rank] if self.pixels else []
        owners = {image: chain.steps[0].trajectory for chain in reversed(chains) for image in chain.images}
        names = {image: f"ticket {ticket}, episode {index}" for image, (ticket, index) in owners.items()}
        return PackedRow(
            tokens=self._tensor(tokens),
            positions=torch.cat(
                [
                    self._positions(chain, content[start : start + chain.length])
                    for start, chain in zip(starts[:-1], chains, strict=True)
                ],
                dim=1,
            ).to(self.device),
            cu_seqlens=self._tensor(starts.astype(np.int32)),
            pixels=self._pixels([unique[i] for i in encoded], names, passes),
            grids=self._tensor(grids),
            predict=self._tensor(predict),
            images=self._tensor(
                np.array([place[image] for chain in chains for image in images_of(chain)], dtype=np.int64)
            ),
            encoded=self._tensor(np.array(encoded, dtype=np.int64)),
            visual=self._tensor(np.flatnonzero(content == self.processor.image_token_id)),
        )

    def _positions(self, chain: Chain, content: np.ndarray) -> torch.Tensor:
        """m-RoPE positions of one chain, int64 [3, tokens]."""
        grids = torch.from_numpy(chain.grids.astype(np.int64))
        return mrope_positions(torch.from_numpy(content), grids, self.processor.image_token_id, self.processor.merge)

    def _pixels(self, images: Sequence[Image], names: Mapping[bytes, str], passes: int) -> torch.Tensor | RowPixels:
        """Patches of encoded images, float32 [patches, dim], checked against the grids that the engine used.

        `names`: the episode of each image.
        """
        if self.shelf is not None:
            names = {self.shelf.find(image): names[image] for image, _ in images}
            images = [(self.shelf.find(image), grid) for image, grid in images]
        for image, grid in images:
            try:
                made = tuple(self.processor.grids([image])[0].tolist())
            except ValueError as error:
                raise PixelError(f"a screenshot of {names[image]} cannot be trained on: {error}") from error
            if made != grid:
                raise InputMismatch(
                    f"image grids differ for a screenshot of {names[image]}: the engine used {list(grid)}, the trainer "
                    f"makes {list(made)}"
                )
        if self.preparation is not None and images:
            return self.preparation.row(images, names, passes)
        with self.waiting.counted():
            pixels, _ = self.processor.pixels([data for data, _ in images])
        return pixels.to(self.device)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
