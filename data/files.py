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
    """Give a finished folder its name. What had the name before goes only now."""
    sync_folder(partial)
    old = folder.parent / f".{folder.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
