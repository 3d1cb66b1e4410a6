"""A cache of directories that are built once, checked on every use, and rebuilt when damaged.

An entry is a directory `<name>-<hash of its recipe>` with a `manifest.json` that holds the sha256
of every other file. It is built in a temporary directory beside its place and renamed, under a lock
file, so a reader never sees half of one and two builders never disturb each other.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

Progress = Callable[[str], None]
MANIFEST = "manifest.json"


class DemoDataError(RuntimeError):
    """A demo model or data set cannot be had; the message is a sentence that names the way out."""


def default_root() -> Path:
    """`$FASER_DEMO_CACHE`, else `faser-sglang/models` in `$XDG_CACHE_HOME` (default `~/.cache`)."""
    if own := os.environ.get("FASER_DEMO_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "faser-sglang" / "models"


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entry_name(name: str, recipe: Mapping[str, Any]) -> str:
    """`<name>-<first 8 hex digits of the recipe's hash>`; the recipe must be plain JSON."""
    canonical = json.dumps(recipe, sort_keys=True).encode()
    return f"{name}-{hashlib.sha256(canonical).hexdigest()[:8]}"


def fault_of(path: Path) -> str | None:
    """What is wrong with the entry at `path`, or None when every file matches the manifest.

    Reads every byte: about a second for 270 MB.
    """
    try:
        expected = dict(json.loads((path / MANIFEST).read_text())["files"])
    except OSError:
        return f"{MANIFEST} cannot be read"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    found = _files_of(path)
    if missing := sorted(expected.keys() - found.keys()):
        return f"{missing[0]} is missing"
    if extra := sorted(found.keys() - expected.keys()):
        return f"{extra[0]} does not belong there"
    for name, file in found.items():
        if sha256_of(file) != expected[name]:
            return f"{name} is damaged"
    return None


def cached(
    root: Path,
    name: str,
    recipe: Mapping[str, Any],
    make: Callable[[Path], None],
    progress: Progress,
) -> Path:
    """The directory that `make(empty directory)` fills: the stored one if intact, else a new one.

    Safe to call from several processes at once: one builds, the others wait and use its result.
    Says through `progress` what it does. Raises whatever `make` raises; a failed build leaves
    nothing behind.
    """
    root.mkdir(parents=True, exist_ok=True)
    place = root / entry_name(name, recipe)
    with _locked(root / f".{place.name}.lock", name, progress):
        if place.exists():
            fault = fault_of(place)
            if fault is None:
                progress(f"{name}: checked {place}")
                return place
            progress(f"{name}: {fault} in {place}, building it again")
        else:
            _announce_new(root, name, progress)
        _remove_leftovers(root, place)
        work = Path(tempfile.mkdtemp(prefix=_work_prefix(place), dir=root))
        try:
            make(work)
            _write_manifest(work, name, recipe)
            _make_readable(work)
            _replace(place, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    progress(f"{name}: built {place}")
    return place


def _locked(path: Path, name: str, progress: Progress) -> AbstractContextManager:
    """Hold the lock file `path`, and say so if that takes waiting."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        progress(f"{name}: waiting for another process that is at work on it")
        return lock.acquire()


def _announce_new(root: Path, name: str, progress: Progress) -> None:
    sibling = re.compile(re.escape(name) + r"-[0-9a-f]{8}")
    others = sorted(entry.name for entry in root.iterdir() if sibling.fullmatch(entry.name))
    kept = f" (of another recipe version, left in place: {', '.join(others)})" if others else ""
    progress(f"{name}: not in {root}, building it{kept}")


def _work_prefix(place: Path) -> str:
    return f".{place.name}.work-"


def _remove_leftovers(root: Path, place: Path) -> None:
    """Clear what a killed builder of this entry left; the lock says that none is alive."""
    for entry in root.glob(_work_prefix(place) + "*"):
        shutil.rmtree(entry, ignore_errors=True)


def _replace(place: Path, work: Path) -> None:
    """Rename `work` to `place`; a damaged entry moves out first: a rename replaces none."""
    if place.exists():
        aside = Path(tempfile.mkdtemp(prefix=_work_prefix(place), dir=place.parent))
        place.rename(aside / "damaged")
        work.rename(place)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        work.rename(place)


def _files_of(path: Path) -> dict[str, Path]:
    files = {
        file.relative_to(path).as_posix(): file
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    files.pop(MANIFEST, None)
    return files


def _make_readable(path: Path) -> None:
    """Open to all what mkdtemp and safetensors write for the owner alone: caches may be shared."""
    path.chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)


def _write_manifest(path: Path, name: str, recipe: Mapping[str, Any]) -> None:
    files = {relative: sha256_of(file) for relative, file in _files_of(path).items()}
    manifest = {"name": name, "recipe": recipe, "files": files}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
