"""Write a Megatron distributed checkpoint's weights as a Hugging Face folder.

CHECKPOINT is what hf_to_megatron wrote, a checkpoint of a trainer (`checkpoints/version-000005`), or its folder
`checkpoints`, of which the latest is taken. Whatever parallel sizes it was written at, the result is the same. Experts
are written in the form of released checkpoints. Optimiser state is left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python tools/megatron_to_hf.py`

from megatron_webrl.model.convert.conversion import megatron_to_hf
from megatron_webrl.system import torchvision_shim
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
    given = parser.parse_args(arguments)
    options = conversion.make_options(given)
    torchvision_shim.install()  # transformers reads the configuration
    return conversion.run_conversion(
        "megatron_to_hf", given.target, lambda: megatron_to_hf(given.source, given.target, given.shard_size, options)
    )


if __name__ == "__main__":
    sys.exit(main())
