"""The exchange of a trainer of one rank, whose process group exists."""

from __future__ import annotations

from pathlib import Path

from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.multi_node.exchange import RecordExchange
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology, RankMessenger
from megatron_webrl.trainer.multi_node.screenshots import ImageCache, ImageShard


def one_node_exchange(ring: Ring) -> RecordExchange:
    messenger = RankMessenger(NodeTopology((0,), 0), 60.0, 60.0)
    return RecordExchange(ring, messenger, ImageCache(messenger, ImageShard(0, 0)), Path())
