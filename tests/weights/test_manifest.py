"""The manifest: its text form, its digest, and how tensors fill buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.weights.manifest import ALIGNMENT, Manifest

_TENSORS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["float32", "bfloat16"])), max_size=12
).map(lambda shapes: [(f"layer.{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes)])


@given(tensors=_TENSORS)
def test_a_manifest_survives_its_text_form(tensors: list) -> None:
    manifest = Manifest.from_list(tensors)
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.digest() == manifest.digest()


@given(tensors=_TENSORS, limit=st.integers(ALIGNMENT, 400))
def test_buckets_carry_every_byte_once_in_order_and_within_the_limit(tensors: list, limit: int) -> None:
    manifest = Manifest.from_list(tensors)
    carried = [0] * len(manifest.entries)
    for bucket in manifest.buckets(limit):
        assert 0 < bucket.bytes <= limit
        end = 0
        for piece in bucket.pieces:
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset >= end
            assert piece.start == carried[piece.entry] < piece.stop
            carried[piece.entry] = piece.stop
            end = piece.offset + piece.stop - piece.start
        assert end <= bucket.bytes
    assert carried == [entry.bytes for entry in manifest.entries]


@pytest.mark.parametrize("other", [[("b", [2], "float32")], [("a", [3], "float32")], [("a", [2], "bfloat16")], []])
def test_any_difference_changes_the_digest(other: list) -> None:
    assert Manifest.from_list([("a", [2], "float32")]).digest() != Manifest.from_list(other).digest()


def test_a_repeated_name_and_an_unknown_type_are_refused() -> None:
    with pytest.raises(ValueError, match="a is twice"):
        Manifest.from_list([("a", [2], "float32"), ("a", [2], "float32")])
    with pytest.raises(ValueError, match="int8"):
        Manifest.from_list([("a", [2], "int8")])


def test_a_bucket_too_small_for_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Manifest.from_list([("a", [2], "float32")]).buckets(8)
