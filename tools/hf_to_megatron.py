"""Convert the weights of a Hugging Face folder into a Megatron distributed checkpoint.

OUT gets `megatron/`, the checkpoint, and `hf/`: configuration, tokenizer and processor. The checkpoint loads at any
parallel sizes; the given sizes decide how it is split into files, so that a rank of the same sizes reads one file.
Needs no GPU, no process group, and memory for one tensor.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python tools/hf_to_megatron.py`

from megatron_webrl.model.convert.conversion import hf_to_megatron
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.util import torchvision_shim
from tools import conversion
from tools.arguments import bounded_number


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="HF_FOLDER")
    parser.add_argument("target", type=Path, metavar="OUT")
    for option, name in (("--tp", "tensor"), ("--pp", "pipeline"), ("--ep", "expert")):
        parser.add_argument(
            option, type=bounded_number(int, 1), default=1, metavar="N", help=f"{name}-parallel size (default: 1)"
        )
    conversion.add_options(parser)
    options = parser.parse_args(arguments)
    sizes = ParallelSizes(tensor=options.tp, pipeline=options.pp, expert=options.ep, expert_tensor=options.tp)
    conversion_options = conversion.make_options(options)
    torchvision_shim.install()  # transformers reads the configuration
    return conversion.run_conversion(
        "hf_to_megatron",
        options.target,
        lambda: hf_to_megatron(options.source, options.target, sizes, conversion_options),
    )


if __name__ == "__main__":
    sys.exit(main())
