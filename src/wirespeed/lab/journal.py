"""The labs of this user on disk: one folder per lab with a lock, a journal and the control socket.

The lock (flock, held by the lab's keeper for its whole life) says whether the lab is alive; process ids are
never compared. What a lab makes in the kernel goes with its keeper, so a dead lab leaves this folder and at
most some processes that carry its token in their environment. The folder is the state directory's
``labs/NAME``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from pathlib import Path

import msgspec

from wirespeed.errors import DataError, MissingCapability, UsageError
from wirespeed.lab import layout

SCHEMA = 1
_MAX_JOURNAL_BYTES = 1 << 20


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """What was made: enough to find and remove it without the process that made it."""

    schema: int = SCHEMA
    name: str
    token: str
    """Random; every process started in the lab carries it in WIRESPEED_LAB_TOKEN."""
    created: str
    keeper_pid: int
    rootless: bool
    owner_pid: int | None
    """The program the lab ends with; None for one made by ``lab up``."""
    spec: layout.LabSpec


class LabFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A lab's folder as found on disk. ``problem`` says why the journal cannot be read, if so."""

    name: str
    path: Path
    is_alive: bool
    journal: Journal | None
    problem: str | None = None


def state_dir() -> Path:
    """Where this user's labs are.

    $WIRESPEED_STATE_DIR, else $XDG_RUNTIME_DIR/wirespeed, else /run/wirespeed (root), else
    /tmp/wirespeed-UID.
    """
    given = os.environ.get("WIRESPEED_STATE_DIR")
    if given:
        return Path(given)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "wirespeed"
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run/wirespeed")
    return Path(f"/tmp/wirespeed-{os.geteuid()}")  # noqa: S108 - ownership is checked by labs_dir


def labs_dir() -> Path:
    """The folder of labs, made with mode 0700. Refuses one that belongs to somebody else."""
    path = state_dir() / "labs"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.mkdir(exist_ok=True, mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise cannot_write(path, error) from None
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise MissingCapability(
            f"{path} belongs to another user", hint="set WIRESPEED_STATE_DIR to a folder of your own"
        )
    return path


def cannot_write(path: Path, error: OSError) -> MissingCapability:
    """The error for a state folder that is full, read-only or forbidden."""
    return MissingCapability(
        f"cannot write the lab's journal in {path}: {error.strerror}",
        hint="free some space there, or set WIRESPEED_STATE_DIR to a folder that can be written",
    )


def claim(name: str | None) -> tuple[str, Path, int]:
    """Reserve a lab name (generated when None): the name, its folder and the locked descriptor that holds it.

    The leftover folder of a dead lab of that name is taken over. Raises UsageError when a living lab has the
    name.
    """
    folder = labs_dir()
    while True:
        chosen = f"lab-{secrets.token_hex(3)}" if name is None else layout.check_name(name)
        path = folder / chosen
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            if name is None:
                continue
        except OSError as error:
            raise cannot_write(path, error) from None
        try:
            lock = _wait_lock(path)
        except FileNotFoundError:
            continue  # somebody is removing the leftover at this moment
        except OSError as error:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise cannot_write(path, error) from None
        if lock is None:
            raise UsageError(
                f"a lab named {chosen!r} is already up",
                hint=f"choose another name, or: wirespeed lab down {chosen}",
            )
        for leftover in path.iterdir():
            if leftover.name != "lock":
                _remove(leftover)
        return chosen, path, lock


def _wait_lock(path: Path) -> int | None:
    """As ``_try_lock``, but not put off by one who only looks whether the lab is alive and holds it for that long."""
    for _ in range(20):
        lock = _try_lock(path, create=True)
        if lock is not None:
            return lock
        time.sleep(0.01)
    return None


def _try_lock(path: Path, *, create: bool) -> int | None:
    """The locked descriptor of a lab's folder, or None when its keeper holds it."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    descriptor = os.open(path / "lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino != (path / "lock").stat().st_ino:
            raise FileNotFoundError(path)  # the one we locked was removed meanwhile
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write(path: Path, journal: Journal) -> None:
    """Write a lab's journal whole or not at all."""
    draft = path / "journal.json.new"
    try:
        with draft.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(journal), indent=1))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path / "journal.json")
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise cannot_write(path, error) from None


def read(path: Path) -> Journal:
    """A lab's journal. Raises DataError when it is absent, corrupt or of another schema."""
    file = path / "journal.json"
    hint = "wirespeed lab down --stale removes what dead labs left"
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_JOURNAL_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read the journal {file}: {error.strerror}", hint=hint) from None
    try:
        journal = msgspec.json.decode(text, type=Journal)
    except (msgspec.MsgspecError, UnicodeDecodeError, UsageError) as error:
        raise DataError(f"the journal {file} is corrupt: {error}", hint=hint) from None
    if journal.schema != SCHEMA or journal.name != path.name:
        raise DataError(
            f"the journal {file} has schema {journal.schema} and name {journal.name!r}",
            expected=f"schema {SCHEMA} and name {path.name!r}",
            hint=hint,
        )
    return journal


def list_labs() -> tuple[LabFolder, ...]:
    """Every lab folder of this user, living and dead."""
    found = []
    for path in sorted(labs_dir().iterdir()):
        if not path.is_dir():
            continue
        journal, problem = None, None
        try:
            journal = read(path)
        except DataError as error:
            problem = error.problem
        found.append(LabFolder(name=path.name, path=path, is_alive=_is_alive(path), journal=journal, problem=problem))
    return tuple(found)


def _is_alive(path: Path) -> bool:
    try:
        lock = _try_lock(path, create=False)
    except OSError:
        return False
    if lock is None:
        return True
    os.close(lock)
    return False


def remove_dead(path: Path) -> bool:
    """Remove the folder of a dead lab; False when it is alive or already gone."""
    try:
        lock = _try_lock(path, create=True)
    except OSError:
        return False
    if lock is None:
        return False
    try:
        remove_folder(path)
    finally:
        os.close(lock)
    return True


def remove_folder(path: Path) -> None:
    """Remove a lab's folder; the caller holds its lock. The lock file goes last."""
    with contextlib.suppress(FileNotFoundError):
        for entry in path.iterdir():
            if entry.name != "lock":
                _remove(entry)
        (path / "lock").unlink()
        path.rmdir()


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
