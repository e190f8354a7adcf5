"""SIGTERM and SIGINT as requests to stop: the current step is finished and saved. A second signal ends the process at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Context manager: inside the block, `number` is the signal that was received, 0 if none."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._receive) for one in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for one in SIGNALS:
            signal.signal(one, signal.SIG_DFL)
