"""A real Chromium, driven by the DevTools protocol: widths, schemes, keys, and what a page says of itself.

A page is loaded as its user would: with its policy, its scripts, its cookie. `errors` has what the browser refused or
failed to do, so that a script that the policy stops is seen.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
WAIT_S = 60.0


class Browser:
    """One tab."""

    def __init__(self, socket: ClientConnection, session: str) -> None:
        self._socket, self._session, self._number = socket, session, 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, "sessionId": self._session}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=WAIT_S))
            self._note(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])

    def look(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """The width of the window, and the scheme that its user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Loads a page, and waits until it has loaded what it names."""
        self.call("Page.navigate", url=address)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = WAIT_S) -> None:
        """Until an expression is true in the page."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} did not come true; {self.errors}; {self.run('location.href')}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """One key, down and up."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def shoot(self, path: Path, *, whole: bool = True) -> None:
        """A picture of the page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A new tab of a new browser, which ends with the block."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            port_file, end = profile / "DevToolsActivePort", time.monotonic() + WAIT_S
            while not (port_file.is_file() and len(port_file.read_text().splitlines()) == 2):
                assert time.monotonic() < end, "chromium did not start"
                time.sleep(0.05)
            port, path = port_file.read_text().splitlines()
            with connect(f"ws://127.0.0.1:{port}{path}", max_size=64 << 20, proxy=None) as socket:
                yield _new_tab(socket)
        finally:
            process.terminate()
            process.wait(timeout=WAIT_S)


def _new_tab(socket: ClientConnection) -> Browser:
    def call(number: int, method: str, **parameters: Any) -> dict[str, Any]:
        socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(socket.recv(timeout=WAIT_S))
            if answer.get("id") == number:
                result: dict[str, Any] = answer["result"]
                return result

    target = call(1_000_001, "Target.createTarget", url="about:blank")["targetId"]
    session = call(1_000_002, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    return Browser(socket, session)
