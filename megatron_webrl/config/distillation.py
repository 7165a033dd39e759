"""Settings of on-policy distillation, trainer.distillation.*: docs/algorithm.md says what they do."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.config.judge import check_key_variable, check_url
from megatron_webrl.config.setting import ConfigError, setting


@dataclass
class DistillationConfig:
    coefficient: float = setting(
        0.0, "Weight of the teacher's advantage of a response token, log teacher - log policy; 0: no teacher.", low=0
    )
    rewards: bool = setting(
        True,
        "Add the teacher's advantage to that of the rewards; otherwise learn from the teacher alone, from every group "
        "whatever its outcomes.",
        only_with="coefficient",
    )
    url: str = setting(
        "",
        "vLLM server of the teacher, started with --enable-scale-out, such as http://node7:8000.",
        check=check_url,
        only_with="coefficient",
    )
    key_variable: str = setting(
        "",
        "Environment variable with the key of the server; empty: none.",
        check=check_key_variable,
        only_with="coefficient",
    )

    def check(self) -> None:
        if self.coefficient and not self.url:
            raise ConfigError(
                f"trainer.distillation.coefficient={self.coefficient} needs a teacher; set trainer.distillation.url to "
                "its vLLM server, such as http://node7:8000"
            )

    @property
    def alone(self) -> bool:
        """Whether the teacher is all there is to learn from, without advantages of rewards."""
        return self.coefficient > 0 and not self.rewards
