"""Transfers between real processes over gloo, and what each side says when one fails."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_webrl.weights import transport
from megatron_webrl.weights.manifest import Manifest
from tests.weights.ranks import digest, rank_process, tensors_of

MANIFEST = Manifest.from_list(
    [
        ("embedding", [100, 16], "float32"),
        ("norm", [7], "bfloat16"),
        ("scale", [], "float32"),
        ("nothing", [0, 4], "float32"),
        *((f"layer.{i}", [33, 9], "bfloat16") for i in range(20)),
        ("last", [0], "float32"),
    ]
)
BUCKET = 1000
SECONDS = 20.0


class Ranks:
    """Ranks 1.. in processes of their own, and the store that all meet at."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.weights.ranks"])
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.results = self.context.Queue()
        self.processes: list = []

    def start(
        self, rank: int, size: int, manifest: Manifest = MANIFEST, bucket: int = BUCKET, seconds: float = SECONDS,
        die_after: int | None = None, transfers: int = 1,
    ) -> None:  # fmt: skip
        arguments = (
            self.results,
            self.store.port,
            rank,
            size,
            manifest.to_json(),
            bucket,
            seconds,
            die_after,
            transfers,
        )
        self.processes.append(self.context.Process(target=rank_process, args=arguments, daemon=True))
        self.processes[-1].start()

    def join(self, size: int, seconds: float = SECONDS) -> transport.Group:
        return transport.join(self.store, "test", 0, size, seconds, "gloo")

    def heard(self, count: int) -> dict[int, str]:
        return dict(self.results.get(timeout=40) for _ in range(count))

    def end(self) -> None:
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.end()


def items(manifest: Manifest = MANIFEST, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(tensors_of(manifest, seed).items())


@pytest.mark.parametrize("bucket", [16, 1000, 2**20])
def test_every_rank_receives_exactly_what_was_sent(ranks: Ranks, bucket: int) -> None:
    ranks.start(1, 3, bucket=bucket, transfers=2)
    ranks.start(2, 3, bucket=bucket, transfers=2)
    group = ranks.join(3)
    for seed in (0, 1):
        transport.send(group, MANIFEST, items(seed=seed), bucket)
        assert ranks.heard(2) == dict.fromkeys((1, 2), digest(tensors_of(MANIFEST, seed)))
    group.close()


def test_another_manifest_is_an_error_on_every_side_that_names_the_rank(ranks: Ranks) -> None:
    other = Manifest.from_list([*((e.name, e.shape, e.dtype) for e in MANIFEST.entries[:-1]), ("last", [1], "float32")])
    ranks.start(1, 3)
    ranks.start(2, 3, manifest=other)
    group = ranks.join(3)
    with pytest.raises(transport.TransferError, match=r"manifests differ: rank 0 .*; rank 2 .* has 25 tensors"):
        transport.send(group, MANIFEST, items(), BUCKET)
    heard = ranks.heard(2)
    assert set(heard) == {1, 2}
    assert all("TransferError" in text and "rank 2" in text for text in heard.values())


def test_another_bucket_size_is_an_error_on_every_side(ranks: Ranks) -> None:
    ranks.start(1, 2, bucket=2000)
    with pytest.raises(transport.TransferError, match=r"buckets of 1000 bytes; rank 1 .* buckets of 2000 bytes"):
        transport.send(ranks.join(2), MANIFEST, items(), BUCKET)
    assert "buckets of 2000" in ranks.heard(1)[1]


def test_a_rank_killed_in_the_middle_is_named_by_all_others_before_the_limit(ranks: Ranks) -> None:
    ranks.start(1, 4, bucket=64)
    ranks.start(2, 4, bucket=64, die_after=2)
    ranks.start(3, 4, bucket=64)
    group = ranks.join(4, seconds=30)
    began = time.monotonic()
    with pytest.raises(transport.TransferError, match=r"dead or cut off: rank 2 \(.*:\d+\)$"):
        transport.send(group, MANIFEST, items(), 64)
    assert time.monotonic() - began < 15
    heard = ranks.heard(2)
    assert set(heard) == {1, 3}
    assert all("dead or cut off: rank 2 (" in text for text in heard.values())


def test_after_a_failure_the_group_refuses_further_transfers(ranks: Ranks) -> None:
    ranks.start(1, 2, die_after=0)
    group = ranks.join(2)
    with pytest.raises(transport.TransferError):
        transport.send(group, MANIFEST, items(), BUCKET)
    with pytest.raises(transport.TransferError, match="cannot be used: transfer 1 failed"):
        transport.send(group, MANIFEST, items(), BUCKET)


def wrong_name() -> Iterator[tuple[str, torch.Tensor]]:
    yield from (("stranger" if name == "layer.3" else name, tensor) for name, tensor in items())


def too_few() -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(items())[:-1]


def too_many() -> Iterator[tuple[str, torch.Tensor]]:
    yield from items()
    yield "stranger", torch.zeros(1)


@pytest.mark.parametrize(("source", "words"), [(wrong_name, "stranger"), (too_few, "nothing"), (too_many, "stranger")])
def test_a_sender_whose_tensors_differ_from_its_manifest_fails_on_every_side(
    ranks: Ranks, source: Callable[[], Iterator[tuple[str, torch.Tensor]]], words: str
) -> None:
    ranks.start(1, 2)
    with pytest.raises(transport.TransferError, match=words):
        transport.send(ranks.join(2), MANIFEST, source(), BUCKET)
    text = ranks.heard(1)[1]
    assert text.startswith("TransferError")
    assert "rank 0" in text
    assert words in text


def test_a_rank_that_never_joins_is_named_after_the_limit(ranks: Ranks) -> None:
    ranks.start(1, 3, seconds=1.0)
    with pytest.raises(transport.TransferError, match=r"rank 2 of 3 did not join within 1 s"):
        ranks.join(3, seconds=1.0)
    assert "rank 2 of 3 did not join" in ranks.heard(1)[1]


def test_a_rank_that_joins_and_never_receives_is_named_after_the_limit(ranks: Ranks) -> None:
    ranks.start(1, 2, transfers=0)
    group = ranks.join(2, seconds=1.0)
    with pytest.raises(transport.TransferError, match=r"dead or cut off: rank 1 \("):
        transport.send(group, MANIFEST, items(), BUCKET)
    with pytest.raises(queue.Empty):
        ranks.results.get_nowait()
