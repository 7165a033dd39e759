"""Who decides the judge's questions at the endpoint."""

from __future__ import annotations

import importlib
from typing import Protocol


class Oracle(Protocol):
    """Decides questions. The server calls it in one thread."""

    def decide(self, stage: str, fields: dict[str, str], images: list[bytes]) -> bool:
        """The verdict on a question, or whether a screenshot gets the highest score rather than the lowest.

        `stage`: name of the prompt file, such as "supported"; `fields`: data of the fences by name, such as TASK;
        `images`: encoded screenshots in order.
        """
        ...


class TextOracle:
    """Compares texts only: never blocked; facts and references must occur in the answer. Equal requests, equal answers.

    Letter case and white space do not matter. All other questions are answered by yes.
    """

    def decide(self, stage: str, fields: dict[str, str], images: list[bytes]) -> bool:
        if stage == "blocked":
            return False
        wanted = {"rubric": "FACT", "reference": "REFERENCE"}.get(stage)
        answer = fields.get("ANSWER")  # not shown to a judge that reads screenshots alone
        return wanted is None or answer is None or _plain(fields[wanted]) in _plain(answer)


def load_oracle(path: str) -> Oracle:
    """Call the factory of an import path, module:factory. Raises ValueError."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--oracle={path} is not module:factory: {type(error).__name__}: {error}") from error


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
