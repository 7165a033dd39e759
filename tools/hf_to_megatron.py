"""Write a Hugging Face folder's weights as a Megatron distributed checkpoint.

OUT gets `megatron/`, which loads at any parallel sizes, and `hf/`: configuration, tokenizer and processor. The sizes
say how the checkpoint is cut into chunks and files; ranks of the same sizes read one file each. No GPU and no process
group is needed, and memory for one tensor is enough.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python tools/hf_to_megatron.py`

from megatron_webrl.model.convert.conversion import hf_to_megatron
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.system import torchvision_shim
from tools import conversion
from tools.arguments import bounded_number


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="HF_FOLDER")
    parser.add_argument("target", type=Path, metavar="OUT")
    for option, what in (("--tp", "tensor"), ("--pp", "pipeline"), ("--ep", "expert")):
        parser.add_argument(
            option, type=bounded_number(int, 1), default=1, metavar="N", help=f"{what}-parallel size (default: 1)"
        )
    conversion.add_options(parser)
    given = parser.parse_args(arguments)
    sizes = ParallelSizes(tensor=given.tp, pipeline=given.pp, expert=given.ep, expert_tensor=given.tp)
    options = conversion.make_options(given)
    torchvision_shim.install()  # transformers reads the configuration
    return conversion.run_conversion(
        "hf_to_megatron", given.target, lambda: hf_to_megatron(given.source, given.target, sizes, options)
    )


if __name__ == "__main__":
    sys.exit(main())
