"""A notebook kernel to drive from a test: run a cell, see its outputs, press the stop button."""

import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_client.manager import KernelManager

from tests.elsewhere import environment
from tests.patience import busy

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outputs:
    """What a cell left in the notebook."""

    text: str = ""  # standard output
    stderr: str = ""
    display: list[dict] = field(default_factory=list)  # by MIME type
    error: str = ""  # the traceback, without its colours
    error_name: str = ""
    error_value: str = ""
    arrived: list[float] = field(default_factory=list)  # seconds after the start, of each text
    seconds: float = 0.0

    @property
    def value(self) -> str:
        """The text of the last thing displayed."""
        return self.display[-1]["text/plain"]


class Kernel:
    """A fresh kernel of this Python, which can import minipar and the tests."""

    def __init__(self, folder: Path = ROOT) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(
            cwd=str(folder), env=environment(), extra_arguments=["--log-level=ERROR"]
        )
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60 * busy())

    def run(self, code: str, *, stop_after: float = 0.0, limit: float = 40.0) -> Outputs:
        """Execute a cell; with `stop_after` the stop button is pressed so many seconds later."""
        outputs, start = Outputs(), time.monotonic()
        if stop_after:
            threading.Timer(stop_after, self.manager.interrupt_kernel).start()
        asked = self.client.execute(code)
        while True:
            left = limit * busy() - (time.monotonic() - start)
            message = self.client.get_iopub_msg(timeout=max(left, 0.01))
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                outputs.text += content["text"]
                outputs.arrived.append(time.monotonic() - start)
            elif kind == "stream":
                outputs.stderr += content["text"]
            elif kind in ("display_data", "execute_result"):
                outputs.display.append(content["data"])
            elif kind == "error":
                plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
                outputs.error = plain
                outputs.error_name, outputs.error_value = content["ename"], content["evalue"]
            elif kind == "status" and content["execution_state"] == "idle":
                outputs.seconds = time.monotonic() - start
                return outputs

    def restart(self) -> None:
        """As the button does it."""
        self.manager.restart_kernel(now=False)
        self.client.wait_for_ready(timeout=60 * busy())

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
