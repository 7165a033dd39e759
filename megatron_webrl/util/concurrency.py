"""Run coroutines together, and functions in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def run_together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in work]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


async def in_own_thread(name: str, function: Callable[..., T], *arguments: Any) -> T:
    """What a function returns or raises, in a thread that does not keep the process from ending."""
    found: Future[T] = Future()

    def work() -> None:
        with suppress(InvalidStateError):  # nobody waits any more
            try:
                found.set_result(function(*arguments))
            except BaseException as error:
                found.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await asyncio.wrap_future(found)
