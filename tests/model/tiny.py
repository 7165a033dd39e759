"""The small models of `webrl gpu-check`."""

from megatron_webrl.gpu_check.small_models import *  # noqa: F403
