"""vLLM's ranks of one node of an engine that spans nodes, for one life of its worker; part.py starts and ends it."""

from __future__ import annotations

import faulthandler
import json
import logging
import sys

from megatron_webrl import stacks
from megatron_webrl.config import read
from megatron_webrl.placement import part_name
from megatron_webrl.rollout import vllm_environment
from megatron_webrl.rollout.parts import Span


def main(settings: str, terms: str) -> int:
    """Run them until one has ended. `terms`: worker, its life and the Span, as JSON."""
    faulthandler.enable()
    stacks.register()
    given = json.loads(terms)
    name = part_name(given["worker"], given["span"]["part"])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    vllm_environment.serve_part(read(settings), given["worker"], given["life"], Span(**given["span"]))
    return 1  # it is ended from outside


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
