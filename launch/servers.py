"""SGLang servers on 127.0.0.1 as context managers, for the demo, the benchmarks and the tests."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

START_TIMEOUT = 600  # seconds; two servers that start at once on two cores take about 100


class ServerError(RuntimeError):
    """The server did not start, or ended; the message holds the end of its log."""


class Server:
    """One SGLang server process on a free port of 127.0.0.1.

    Args:
        model: target checkpoint. draft: draft checkpoint; it or ``is_faser`` selects FASER.
        args: further command-line arguments. env: further environment variables.
        name: what messages call it. log: where its output goes (default: a temporary file).

    Use it as a context manager: entering starts it and waits until it answers, leaving ends the
    processes that it started. Several can ``launch`` at once and be waited for in turn.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        draft: str | Path | None = None,
        is_faser: bool | None = None,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        name: str = "server",
        log: str | Path | None = None,
    ) -> None:
        self.name = name
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log or tempfile.mkstemp(prefix=f"{name}-", suffix=".log")[1])
        self.command = [
            sys.executable, "-m", "sglang.launch_server",
            "--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port),
            *(["--speculative-algorithm", "FASER"] if is_faser or draft is not None else []),
            *(["--speculative-draft-model-path", str(draft)] if draft is not None else []),
            *args,
        ]  # fmt: skip
        self.env = {
            **os.environ,
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_model_modules()),
            **(env or {}),
        }
        self.process: subprocess.Popen | None = None

    def launch(self) -> Server:
        """Start the process and return at once."""
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.env,
                start_new_session=True,  # a group of its own, by which its children are known
            )
        return self

    def wait(self, progress: Callable[[str], None] | None = None) -> Server:
        """Wait until it answers; raises ServerError if it ends or takes too long."""
        began = said = time.monotonic()
        while time.monotonic() - began < START_TIMEOUT:
            if self.process.poll() is not None:
                self.stop()
                raise ServerError(f"{self.name} ended while starting:\n{self.log_tail()}")
            try:
                if requests.get(f"{self.base_url}/health", timeout=5).status_code == 200:
                    return self
            except requests.RequestException:
                pass
            if progress is not None and time.monotonic() - said > 10:
                said = time.monotonic()
                progress(f"{self.name}: starting, {said - began:.0f} s")
            time.sleep(0.5)
        self.stop()
        raise ServerError(f"{self.name} did not answer in {START_TIMEOUT} s:\n{self.log_tail()}")

    def stop(self) -> None:
        """End the process and its children, also those that it left behind when it ended."""
        if self.process is None:
            return
        group = [p for p in psutil.process_iter() if _group_of(p.pid) == self.process.pid]
        for process in group:
            _signal(process.terminate)
        _, alive = psutil.wait_procs(group, timeout=10)
        for process in alive:
            _signal(process.kill)
        psutil.wait_procs(alive, timeout=10)
        self.process.wait()

    def __enter__(self) -> Server:
        return start_all([self])[0]

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def post(self, path: str, body: dict[str, Any], timeout: float = 300) -> requests.Response:
        return requests.post(f"{self.base_url}{path}", json=body, timeout=timeout)

    def generate(self, prompt: str | list[int], **params: Any) -> dict[str, Any]:
        """Native /generate of one prompt (text or ids); raises for a status other than 200."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        answer = self.post("/generate", {key: prompt, "sampling_params": params})
        if answer.status_code != 200:
            raise ServerError(f"{self.name} answered {answer.status_code}: {answer.text}")
        return answer.json()

    def info(self) -> dict[str, Any]:
        """What the scheduler says in ``/server_info`` (its first rank)."""
        answer = requests.get(f"{self.base_url}/server_info", timeout=60).json()
        return answer["internal_states"][0]

    def faser(self) -> dict[str, Any]:
        """FASER's block of ``/server_info``."""
        return self.info()["faser"]

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def start_all(
    servers: Sequence[Server], progress: Callable[[str], None] | None = None
) -> list[Server]:
    """Launch all, then wait for each; if one fails, all are stopped."""
    try:
        for server in servers:
            server.launch()
        return [server.wait(progress) for server in servers]
    except BaseException:
        for server in servers:
            server.stop()
        raise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _other_model_modules() -> list[str]:
    """SGLang's model files but Llama's: the demo needs no other, and importing all takes long."""
    import sglang

    folder = Path(sglang.__file__).parent / "srt" / "models"
    names = [module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg]
    return [name for name in names if not name.startswith("llama")]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _signal(send: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        send()
