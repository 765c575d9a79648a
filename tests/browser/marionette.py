"""Firefox without a display, driven by its own protocol: Marionette, JSON over a local socket.

Playwright needs a patched Firefox, and Selenium another program, geckodriver. Marionette is in every Firefox.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 60
PREFERENCES = {
    "marionette.port": 0,  # any; Firefox writes it into its profile
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "toolkit.telemetry.enabled": False,
}


class Marionette:
    """One session with one window."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.calls = 0
        self._receive()  # the greeting
        self.call("WebDriver:NewSession", capabilities={"alwaysMatch": {}})

    def call(self, command: str, **parameters: Any) -> Any:
        """Call a command of WebDriver; an error of Firefox is raised."""
        self.calls += 1
        message = json.dumps([0, self.calls, command, parameters]).encode()
        self.connection.sendall(b"%d:%s" % (len(message), message))
        _, _, error, result = self._receive()
        if error is not None:
            raise RuntimeError(f"{command}: {error['message']}")
        return result

    def _receive(self) -> Any:
        """One message, after its length and a colon."""
        head = b""
        while not head.endswith(b":"):
            head += self._read(1)
        return json.loads(self._read(int(head[:-1])))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.connection.recv(count - len(data))
            if not part:
                raise ConnectionError("Firefox closed the connection")
            data += part
        return data

    def open(self, url: str) -> None:
        self.call("WebDriver:Navigate", url=url)

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        return self.call("WebDriver:ExecuteScript", script=script, args=[])["value"]

    def until(self, script: str, seconds: float) -> Any:
        """The first value of an expression that counts as true in Python."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {script}")):
            if time.monotonic() > end:
                raise TimeoutError(f"{script}: still {value!r} after {seconds:.0f} s")
            time.sleep(0.1)
        return value

    def _find(self, selector: str) -> str:
        found = self.call("WebDriver:FindElement", using="css selector", value=selector)
        return str(next(iter(found["value"].values())))

    def click(self, selector: str) -> None:
        self.call("WebDriver:ElementClick", id=self._find(selector))

    def type(self, selector: str, text: str) -> None:
        """Type into a field, instead of what is in it."""
        field = self._find(selector)
        self.call("WebDriver:ElementClear", id=field)
        self.call("WebDriver:ElementSendKeys", id=field, text=text)


@contextmanager
def firefox(path: str, profile: Path) -> Iterator[Marionette]:
    """Start Firefox with a new profile, and end it."""
    lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});\n" for k, v in PREFERENCES.items()]
    (profile / "user.js").write_text("".join(lines), encoding="utf-8")
    arguments = ["--headless", "--marionette", "--no-remote", "--profile", str(profile)]
    process = subprocess.Popen(
        [path, *arguments],
        env={**os.environ, "HOME": str(profile)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with socket.create_connection(("127.0.0.1", _port(process, profile)), 60) as connection:
            yield Marionette(connection)
    finally:
        process.terminate()
        process.wait(timeout=60)


def _port(process: subprocess.Popen[bytes], profile: Path) -> int:
    """The port on which Firefox listens, as soon as it does."""
    written, end = profile / "MarionetteActivePort", time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if written.exists() and (text := written.read_text(encoding="ascii").strip()):
            return int(text)
        time.sleep(0.1)
    raise TimeoutError(f"Firefox did not start within {START_SECONDS} s")
