"""vLLM's ranks of one node of an engine that spans nodes, for one life of its worker; part.py starts and ends it."""

from __future__ import annotations

import faulthandler
import json
import logging
import sys

from megatron_webrl.cluster.placement import rollout_process_name
from megatron_webrl.config.load import parse_config
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.rollout.engine.engine_leader import NodeSpan
from megatron_webrl.system import stack_dump


def main(settings: str, terms: str) -> int:
    """Run them until one has ended. `terms`: worker, its life and the Span, as JSON."""
    faulthandler.enable()
    stack_dump.register_dump_signal()
    given = json.loads(terms)
    name = rollout_process_name(given["worker"], given["span"]["node_rank"])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    vllm_environment.run_follower(
        parse_config(settings), given["worker"], given["instance_number"], NodeSpan(**given["span"])
    )
    return 1  # it is ended from outside


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
