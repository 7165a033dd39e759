"""The small models of `webrl check gpu`."""

from megatron_webrl.checks.oracles import *  # noqa: F403
