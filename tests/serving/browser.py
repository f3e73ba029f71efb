"""A Chromium without a screen, driven over its debugging pipe (`--remote-debugging-pipe`); no tests in here."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
    "--window-size=1180,800",
)


class Browser:
    """One page. Messages are JSON, each with a zero byte behind it."""

    def __init__(self, to: int, back: BufferedReader) -> None:
        self._to, self._back, self._held, self._number = to, back, b"", 0
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]

    def open(self, address: str) -> None:
        """Go there."""
        self._ask("Page.navigate", {"url": address}, self._session)

    def value(self, expression: str) -> Any:
        """What JavaScript says."""
        asked = {"expression": expression, "returnByValue": True}
        return self._ask("Runtime.evaluate", asked, self._session)["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Until it is true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, self.value("document.body.innerText")
            time.sleep(0.05)

    def picture(self, file: Path) -> None:
        """Of the whole page, as PNG."""
        asked: dict[str, object] = {"format": "png", "captureBeyondViewport": True}
        file.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", asked, self._session)["data"]))

    def _ask(self, method: str, params: dict[str, object], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": params,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def _read(self) -> bytes:
        while b"\0" not in self._held:
            part = self._back.read1(1 << 16)
            assert part, "the browser has ended"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in a folder. Skips the test where there is no Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium; install Debian's package to test the page")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # The pipe has the numbers 3 and 4 in the browser.
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    command = ["bash", "-c", script, chromium, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), **quiet)  # type: ignore[call-overload]
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        with os.fdopen(ours_in, "rb") as back:
            yield Browser(ours_out, back)
    finally:
        process.kill()
        process.wait(30)
        os.close(ours_out)
