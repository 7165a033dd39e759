"""The small models of `webrl gpu-check`."""

from megatron_webrl.checks.gpu.small_models import *  # noqa: F403
