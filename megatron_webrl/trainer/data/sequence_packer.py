"""Tensors of packed sequences: the micro-batches of a replica, and the response tokens that a rank scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.processor import Processor
from megatron_webrl.model.vision_language.packed_input import NOT_RECORDED, PackedInput, partition_images, token_range
from megatron_webrl.model.vision_language.rope import mrope_position_ids
from megatron_webrl.trainer.data.batching import StepId, TrainingSample, token_weights
from megatron_webrl.trainer.data.packing import FlopsEstimator, PackedSequence, pack_sequences
from megatron_webrl.trainer.data.prefix_merging import (
    MIN_SHARED_TOKENS,
    MergedSequence,
    PrefixTree,
    Segment,
    build_prefix_tree,
    merge_prefixes,
    packed_experts,
    restrict_to,
    separate_sequences,
    sequence_images,
    unique_images,
    unmerged_sequence,
)
from megatron_webrl.trainer.images import (
    ImagePrefetcher,
    ImagePreparationError,
    PrefetchedPixels,
    WaitTimer,
)
from megatron_webrl.trainer.loss.token_data import ResponseTokens
from megatron_webrl.trainer.multi_node.screenshots import ImageCache

NON_IMAGE_TOKEN = -1  # replaces response tokens in the search for image placeholders: in a response these are text
ImageWithGrid = tuple[bytes, tuple[int, int, int]]  # encoded image, and the grid that the engine used


class ImageGridMismatch(ValueError):
    """The trainer's image grid differs from the engine's: training on it would be silently wrong."""


@dataclass(frozen=True, kw_only=True)
class Microbatch(ResponseTokens):
    """Packed sequences, and the response tokens that this context-parallel rank scores, by sample, then by position."""

    inputs: PackedInput
    targets: torch.Tensor  # int64 [tokens]
    succeeded: torch.Tensor  # bool [tokens], whether the token's episode is a success
    step_ids: tuple[StepId, ...]  # of each step
    value_weight: torch.Tensor  # float32 [values], of the steps whose first response token this rank scores
    temperature: float
    token_count: int  # prompts included; 0 for a padding micro-batch, or if another rank counts the tokens
    replayed_tokens: int = 0  # of token_count, tokens that go to the engine's experts
    value_targets: torch.Tensor | None = None  # float32 [values]; None without a critic
    operations: float = 0.0  # floating-point operations of a forward pass on all ranks; 0 where token_count is 0


@dataclass(frozen=True)
class _PlannedMicrobatch:
    sequences: Sequence[MergedSequence]
    step_weights: Sequence[float]  # the token weight of each step
    tree: PrefixTree  # the segments that are computed
    value_weight: float  # of each step in the value loss: one over the minibatch's steps; 0 for padding


_Plan = Sequence[Sequence[_PlannedMicrobatch]]  # the micro-batches of each replica


@dataclass(frozen=True)
class SequencePacker:
    """Makes this rank's micro-batches of a minibatch.

    All ranks of a replica make the same ones except for pixels: tensor- and context-parallel ranks divide the images,
    and ranks without a vision tower make none. With a `prefetcher`, pixels are prepared before the forward pass that
    needs them, else all at once. `wait_timer` measures how long the rank waits for pixels.
    """

    processor: Processor
    max_tokens: int  # tokens of a micro-batch
    device: torch.device
    data_parallel_rank: int
    data_parallel_size: int
    flops_estimator: FlopsEstimator
    microbatch_multiple: int = 1  # divides the number of a replica's micro-batches
    merge_prefixes: str = "all"  # trainer.merge_prefixes: what is computed once
    min_shared_tokens: int = MIN_SHARED_TOKENS  # of a prefix that several sequences have in common
    replays_routing: bool = False  # trainer.routing_replay: whether tokens go to the experts that samples hold
    image_rank: int | None = 0  # this rank among those that divide a micro-batch's images; None: it encodes none
    num_image_ranks: int = 1
    context_parallel_rank: int = 0
    context_parallel_size: int = 1
    token_multiple: int = 1  # divides the number of tokens of a context-parallel rank
    prefetcher: ImagePrefetcher | None = None
    image_cache: ImageCache | None = None  # finds screenshots where samples hold image keys
    wait_timer: WaitTimer = field(default_factory=WaitTimer)

    def build(
        self, samples: Sequence[TrainingSample], normalizer: str, constant_steps: int, passes: int = 1
    ) -> list[Microbatch]:
        """This replica's micro-batches, see build_all; the weighted sum over those of all replicas is the objective."""
        return self.build_all([samples], normalizer, constant_steps, [passes])[0]

    def build_all(
        self,
        minibatches: Sequence[Sequence[TrainingSample]],
        normalizer: str,
        constant_steps: int,
        passes: Sequence[int],
    ) -> list[list[Microbatch]]:
        """The micro-batches of minibatches, in this order again and again, until each has had its number of passes.

        With an `image_cache` collective.

        Replicas get equally many, as each must take part in every pass: empty ones hold the shortest sample at weight
        zero. Raises ImageGridMismatch; ImagePreparationError; ValueError for a sample longer than max_tokens.
        """
        # Lazily: workers prepare pixels of the first micro-batches while the next minibatch is planned.
        plans: Iterable[_Plan] = (self._plan(samples, normalizer, constant_steps) for samples in minibatches)
        if self.image_cache is not None:
            plans = list(plans)
            self.image_cache.fetch(self._wanted_images(self.image_cache, plans))
        return [
            [self._microbatch(each, count) for each in plan[self.data_parallel_rank]]
            for plan, count in zip(plans, passes, strict=True)
        ]

    def _plan(self, samples: Sequence[TrainingSample], normalizer: str, constant_steps: int) -> _Plan:
        sequences = (
            [unmerged_sequence(sample) for sample in samples]
            if self.merge_prefixes == "none"
            else merge_prefixes(samples, self.processor.placeholder_token_ids)
        )
        tree = self._prefix_tree(sequences)
        flat = iter(token_weights([step for each in sequences for step in each.samples], normalizer, constant_steps))
        weights = [[next(flat) for _ in sequence.samples] for sequence in sequences]
        shortest = [unmerged_sequence(min(samples, key=lambda sample: sample.length))]
        padding = _PlannedMicrobatch(shortest, [0.0], separate_sequences(shortest), 0.0)
        nodes = None if self.image_cache is None else self.image_cache.replica_nodes

        def planned(packed: PackedSequence) -> _PlannedMicrobatch:
            step_weights = [weight for i in packed for weight in weights[i]]
            restricted = restrict_to(tree, packed)
            return _PlannedMicrobatch([sequences[i] for i in packed], step_weights, restricted, 1 / len(samples))

        replicas, multiple = self.data_parallel_size, self.microbatch_multiple
        packed_by_replica = pack_sequences(
            sequences, self.flops_estimator, self.max_tokens, replicas, multiple, nodes, tree
        )
        return [[planned(packed) if packed else padding for packed in each] for each in packed_by_replica]

    def _prefix_tree(self, sequences: Sequence[MergedSequence]) -> PrefixTree:
        if self.merge_prefixes != "all":
            return separate_sequences(sequences)
        image_token, square = self.processor.image_token_id, self.processor.merge_size
        return build_prefix_tree(
            sequences, self.processor.placeholder_token_ids, image_token, square, self.min_shared_tokens
        )

    def _wanted_images(self, image_cache: ImageCache, plans: Sequence[_Plan]) -> dict[int, list[bytes]]:
        """Rank -> keys of the screenshots that it encodes."""
        wanted: dict[int, list[bytes]] = {}
        for replica in range(self.data_parallel_size):
            ranks = image_cache.image_ranks_of(replica)
            for microbatch in (each for plan in plans for each in plan[replica]):
                unique = unique_images(microbatch.sequences)
                for image_rank, part in enumerate(partition_images([grid for _, grid in unique], self.num_image_ranks)):
                    wanted.setdefault(ranks[image_rank], []).extend(unique[i][0] for i in part)
        return wanted

    def close(self) -> None:
        """Stop the prefetcher's workers."""
        if self.prefetcher is not None:
            self.prefetcher.close()

    def _microbatch(self, planned: _PlannedMicrobatch, passes: int) -> Microbatch:
        sequences, step_weights, tree = planned.sequences, planned.step_weights, planned.tree
        # The token before a response token scores it; where sequences branch, one token scores a token of each branch.
        scoring = np.concatenate(
            [
                tree.token_positions(i, sequence.length)[sequence.response_positions - 1]
                for i, sequence in enumerate(sequences)
            ]
        )
        targets = np.concatenate([sequence.tokens[sequence.response_positions] for sequence in sequences])
        steps = [step for sequence in sequences for step in sequence.samples]
        counts = [len(step.response) for step in steps]
        share = token_range(tree.tokens, self.context_parallel_rank, self.context_parallel_size, self.token_multiple)
        local = (scoring >= share.start) & (scoring < share.stop)
        # What scores a step's first response token is the last token of its prompt, where a critic values the step.
        value_rows = np.flatnonzero(np.concatenate([np.arange(count) == 0 for count in counts])[local])

        def per_token(numbers: Sequence[float]) -> torch.Tensor:
            return self._tensor(np.repeat(numbers, counts)[local].astype(np.float32))

        def concatenated(arrays: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
            return self._tensor(np.concatenate(arrays)[local].astype(dtype))

        no_teacher = all(step.teacher_logprobs is None for step in steps)
        counts_tokens = self.context_parallel_rank == 0 and any(step_weights)
        experts = packed_experts(sequences, tree) if self.replays_routing else None
        replayed = 0 if experts is None else int((experts[:, 0, 0] != NOT_RECORDED).sum())
        return Microbatch(
            inputs=replace(
                self._packed_input(sequences, tree, scoring[local], passes),
                value_rows=self._tensor(value_rows),
                experts=None if experts is None else self._tensor(experts),
            ),
            targets=self._tensor(targets[local].astype(np.int64)),
            behaviour_logprobs=concatenated([step.behaviour_logprobs for step in steps], np.float32),
            versions=concatenated([step.versions for step in steps], np.int32),
            advantage=per_token([step.advantage for step in steps]),
            weight=per_token(step_weights),
            succeeded=per_token([step.succeeded for step in steps]).bool(),
            step_index=self._tensor(np.repeat(np.arange(len(steps)), counts)[local]),
            step_lengths=self._tensor(np.array(counts, np.float32)),
            step_ids=tuple(step.step_id for step in steps),
            value_weight=self._tensor(np.full(len(value_rows), planned.value_weight, np.float32)),
            temperature=sequences[0].temperature,
            token_count=tree.tokens if counts_tokens else 0,
            replayed_tokens=replayed if counts_tokens else 0,
            teacher_logprobs=None if no_teacher else concatenated([*map(_teacher_logprobs, steps)], np.float32),
            operations=self.flops_estimator.tree_flops(sequences, tree.segments) if counts_tokens else 0.0,
        )

    def _packed_input(
        self,
        sequences: Sequence[MergedSequence],
        tree: PrefixTree,
        scored_positions: np.ndarray,
        passes: int,
    ) -> PackedInput:
        unique = unique_images(sequences)
        index_of = {image: index for index, image in enumerate(unique)}
        grids = np.array([grid for _, grid in unique], np.int64).reshape(-1, 3)
        local: list[int] = []
        if self.image_rank is not None:
            local = partition_images(grids.tolist(), self.num_image_ranks)[self.image_rank]
        owners = {image: each.samples[0].trajectory_id for each in reversed(sequences) for image in each.images}
        episodes = {image: f"ticket {ticket}, episode {index}" for image, (ticket, index) in owners.items()}
        # Positions and images of the sequences that represent segments.
        contents = {segment.sequence: self._content(sequences[segment.sequence]) for segment in tree.segments}
        position_ids = {i: self._position_ids(sequences[i], content) for i, content in contents.items()}
        parts = [(segment, sequences[segment.sequence]) for segment in tree.segments]
        content = np.concatenate([contents[each.sequence][each.start : each.stop] for each in tree.segments])
        tokens = np.concatenate([sequence.tokens[each.start : each.stop] for each, sequence in parts])
        positions = [position_ids[each.sequence][:, each.start : each.stop] for each in tree.segments]
        images = [
            image for each, sequence in parts for image in self._images_of(each, sequence, contents[each.sequence])
        ]
        return PackedInput(
            tokens=self._tensor(tokens.astype(np.int64)),
            position_ids=copy_to_device(torch.cat(positions, dim=1), self.device),
            cu_seqlens=torch.from_numpy(tree.starts.astype(np.int32)),
            parents=torch.from_numpy(tree.parents),
            pixels=self._pixels([unique[i] for i in local], episodes, passes),
            grids=torch.from_numpy(grids),
            scored_positions=self._tensor(scored_positions),
            image_indices=torch.from_numpy(np.array([index_of[image] for image in images], dtype=np.int64)),
            local_images=torch.from_numpy(np.array(local, dtype=np.int64)),
            image_token_positions=torch.from_numpy(np.flatnonzero(content == self.processor.image_token_id)),
        )

    def _images_of(self, segment: Segment, sequence: MergedSequence, content: np.ndarray) -> list[ImageWithGrid]:
        """Images whose placeholders are in a segment, in token order. `content`: of its sequence."""
        sizes = sequence.grids.prod(axis=1) // self.processor.merge_size**2
        first = np.flatnonzero(content == self.processor.image_token_id)[np.cumsum(sizes) - sizes]
        images = sequence_images(sequence)
        return [images[i] for i in np.flatnonzero((first >= segment.start) & (first < segment.stop))]

    def _content(self, sequence: MergedSequence) -> np.ndarray:
        """int64 [tokens], the tokens with NON_IMAGE_TOKEN in place of responses."""
        content = sequence.tokens.astype(np.int64)
        content[sequence.response_positions] = NON_IMAGE_TOKEN
        return content

    def _position_ids(self, sequence: MergedSequence, content: np.ndarray) -> torch.Tensor:
        """m-RoPE positions of one sequence, int64 [3, tokens]."""
        grids = torch.from_numpy(sequence.grids.astype(np.int64))
        return mrope_position_ids(
            torch.from_numpy(content), grids, self.processor.image_token_id, self.processor.merge_size
        )

    def _pixels(
        self, images: Sequence[ImageWithGrid], episodes: Mapping[bytes, str], passes: int
    ) -> torch.Tensor | PrefetchedPixels:
        """Patches, float32 [patches, dim], once grids match the engine's; `episodes` names images in errors."""
        if self.image_cache is not None:
            episodes = {self.image_cache.get(image): episodes[image] for image, _ in images}
            images = [(self.image_cache.get(image), grid) for image, grid in images]
        for image, grid in images:
            try:
                actual = tuple(self.processor.grids([image])[0].tolist())
            except ValueError as exc:
                raise ImagePreparationError(f"a screenshot of {episodes[image]} cannot be trained on: {exc}") from exc
            if actual != grid:
                raise ImageGridMismatch(
                    f"image grids differ for a screenshot of {episodes[image]}: the engine used {list(grid)}, the "
                    f"trainer makes {list(actual)}"
                )
        if self.prefetcher is not None and images:
            return self.prefetcher.schedule(images, episodes, passes)
        with self.wait_timer.measure():
            pixels, _ = self.processor.pixels([data for data, _ in images])
        return copy_to_device(pixels, self.device)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return copy_to_device(torch.from_numpy(array), self.device)


def _teacher_logprobs(step: TrainingSample) -> np.ndarray:
    scores = step.teacher_logprobs
    return np.full(len(step.response), np.nan, np.float32) if scores is None else scores
