"""Convert the weights of a Megatron distributed checkpoint into a Hugging Face folder.

CHECKPOINT is the output of hf_to_megatron, a checkpoint of a trainer (`checkpoints/version-000005`), or the folder of a
run or its `checkpoints` (the latest one). The result does not depend on the parallel sizes of the checkpoint. Experts
have the layout of released checkpoints; optimiser state is not converted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python tools/megatron_to_hf.py`

from megatron_webrl.launch.evaluation import newest_in_run
from megatron_webrl.model.convert.conversion import megatron_to_hf
from megatron_webrl.util import torchvision_shim
from tools import conversion


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="CHECKPOINT")
    parser.add_argument("target", type=Path, metavar="OUT")
    parser.add_argument(
        "--shard-size", type=conversion.parse_size, default="5GB", help="largest safetensors file (default: 5GB)"
    )
    conversion.add_options(parser)
    options = parser.parse_args(arguments)
    conversion_options = conversion.make_options(options)
    torchvision_shim.install()  # transformers reads the configuration
    return conversion.run_conversion(
        "megatron_to_hf",
        options.target,
        lambda: megatron_to_hf(
            newest_in_run(options.source) or options.source, options.target, options.shard_size, conversion_options
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
