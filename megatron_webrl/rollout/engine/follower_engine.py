"""vLLM's ranks on a follower's node, for one instance of the worker; engine_follower.py starts and kills it."""

from __future__ import annotations

import faulthandler
import json
import sys

from megatron_webrl.config.load import parse_config
from megatron_webrl.placement.placement import rollout_process_name
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.rollout.engine.engine_leader import NodeSpan
from megatron_webrl.util import stack_dump
from megatron_webrl.util.text import configure_logging


def main(settings: str, arguments: str) -> int:
    """Run the ranks until one ends. `arguments`: worker, its instance number and the NodeSpan, as JSON."""
    faulthandler.enable()
    stack_dump.register_dump_signal()
    start = json.loads(arguments)
    name = rollout_process_name(start["worker"], start["span"]["node_rank"])
    configure_logging(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    vllm_environment.run_follower(
        parse_config(settings), start["worker"], start["instance_number"], NodeSpan(**start["span"])
    )
    return 1  # the follower kills this process; a return is a failure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
