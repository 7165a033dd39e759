"""Stored episodes as a dataset of Hugging Face: one Parquet file, a row for each episode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_webrl.monitor.episode_index import SCHEMA
from megatron_webrl.monitor.episode_view import TokenTexts
from megatron_webrl.types import Trajectory

ROWS_AT_ONCE = 8  # episodes in memory, with their screenshots
_INDEX_FIELDS = [name for name in SCHEMA.names if name not in ("folder", "file", "position", "words", "instruction")]
_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_STEP = pa.struct(
    {
        "prompt": pa.string(), "response": pa.string(), "action": pa.string(), "format_error": pa.string(),
        "images": pa.list_(pa.int64()), "logprobs": pa.list_(pa.float32()), "versions": pa.list_(pa.int64()),
        "url": pa.string(), "title": pa.string(),
    }
)  # fmt: skip
DATASET_SCHEMA = pa.schema(
    [
        *(SCHEMA.field(name) for name in _INDEX_FIELDS),
        pa.field("disposition", pa.string()),
        pa.field("instruction", pa.string()),
        pa.field("images", pa.list_(_IMAGE)),
        pa.field("trajectory", pa.list_(_STEP)),
    ]
)


def _feature(kind: pa.DataType) -> Any:
    """A type as `datasets` describes it; images so that they are decoded."""
    if kind == _IMAGE:
        return {"_type": "Image"}
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    if pa.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    return {"dtype": {"double": "float64", "float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}


def write_dataset(path: Path, episodes: Iterable[tuple[Mapping[str, Any], Trajectory]], texts: TokenTexts) -> int:
    """Write episodes, each with its row of the index, a few in memory at once; returns their number. Raises OSError."""
    features = {field.name: _feature(field.type) for field in DATASET_SCHEMA}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema, count, batch = DATASET_SCHEMA.with_metadata(metadata), 0, []
    with pq.ParquetWriter(path, schema) as file:
        for row, trajectory in episodes:
            batch.append(_dataset_row(row, trajectory, texts))
            count += 1
            if len(batch) == ROWS_AT_ONCE:
                file.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        file.write_table(pa.Table.from_pylist(batch, schema))
    return count


def _dataset_row(row: Mapping[str, Any], trajectory: Trajectory, texts: TokenTexts) -> dict[str, Any]:
    return {
        **{name: row[name] for name in (*_INDEX_FIELDS, "disposition")},
        "instruction": _utf8(trajectory.instruction),
        "images": [{"bytes": bytes(image), "path": None} for image in trajectory.images],
        "trajectory": [
            {
                "prompt": texts.text(step.prompt_token_ids),
                "response": texts.text(step.response_token_ids),
                "action": None if step.action is None else json.dumps(asdict(step.action)),
                "format_error": step.format_error,
                "images": step.images.tolist(),
                "logprobs": step.logprobs.tolist(),
                "versions": step.versions.tolist(),
                "url": _utf8(step.url),
                "title": _utf8(step.title),
            }
            for step in trajectory.steps
        ],
    }


def _utf8(text: str) -> str:
    """The text without lone surrogates, which UTF-8 does not have."""
    return text.encode(errors="replace").decode()
