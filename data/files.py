"""Writing so that a kill at any moment leaves nothing half-done under a final name."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no such locks: there, two writers of one thing must not run at once
    fcntl = None


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the right to write `target`, a file or folder that need not exist; wait for who holds it now."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that prepares {target}", flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the kernel lets go of the lock when the file closes, however the process ends


def write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def move_into_place(partial: Path, folder: Path) -> None:
    """Give a finished folder its name. At every instant a whole one is there: `folder`, or `place_of_old(folder)`."""
    sync(partial)
    old = place_of_old(folder)
    if folder.exists():  # else a kill came between the two renames, and the old one is the only whole one
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(partial, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def place_of_old(folder: Path) -> Path:
    """Where a folder stands while a new one takes its name."""
    return folder.parent / f".{folder.name}.old"


def sync(path: Path) -> None:
    """Force a file's contents, or a folder's list of names, onto the disk."""
    if path.is_dir() and os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
