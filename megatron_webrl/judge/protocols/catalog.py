"""The protocols by name."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_webrl.judge.protocols.base import JudgeProtocol
from megatron_webrl.judge.protocols.rubric import RubricProtocol
from megatron_webrl.judge.protocols.webjudge import WebJudgeProtocol
from megatron_webrl.judge.protocols.webvoyager import WebVoyagerProtocol

PROTOCOLS: Sequence[type[JudgeProtocol]] = (RubricProtocol, WebJudgeProtocol, WebVoyagerProtocol)
