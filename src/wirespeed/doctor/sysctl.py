"""Kernel parameters set so that they can be put back: by us, only where they are still ours.

The journal is written before any parameter changes, and says for each the value before (``old``) and the one wanted
(``new``). So whatever moment the program ends at, ``rollback`` finds in it all that may have been changed:

    journal with the intent -> parameters, one by one, each read back and noted -> drop-in -> journal says "done"

A rollback goes the other way and removes the journal last. Both may be repeated at any point. A parameter that has
neither our value nor the old one was changed by someone else: it is left alone and reported. ``net.*`` belongs to one
network namespace; the journal names it, and is refused in another.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import ClassVar, Literal

import msgspec

from wirespeed.doctor.advice import read_sysctl_files
from wirespeed.doctor.check import Setting
from wirespeed.doctor.inventory import HostView
from wirespeed.errors import DataError, MissingCapability, UsageError
from wirespeed.system import System

JOURNAL = "/var/lib/wirespeed/sysctl.json"
DROP_IN = "/etc/sysctl.d/90-wirespeed.conf"
# What may be set: never a parameter that changes who may do what on this host.
_ALLOWED = ("net.core.", "net.ipv4.", "net.ipv6.", "net.netfilter.", "kernel.numa_balancing")
_HEAD = "# Written by `wirespeed doctor host --apply`; `wirespeed doctor host --rollback` takes it back."

Action = Literal["set", "kept", "restored", "conflict", "refused", "clamped", "gone"]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter that is or may be ours. ``held`` is what was read back; None until then."""

    key: str
    old: str
    new: str
    held: str | None = None
    at: str = ""
    earlier: tuple[str, ...] = ()
    """What earlier runs had set, or the kernel had made of it: ours too, should this run end before it writes."""

    @property
    def values(self) -> frozenset[str]:
        """Every value of this parameter that is our doing."""
        return frozenset({self.new, *self.earlier, *(() if self.held is None else (self.held,))})


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """What was set, in order."""

    SCHEMA: ClassVar[int] = 1

    schema: int = 1
    kind: Literal["sysctl_journal"] = "sysctl_journal"
    boot_id: str
    namespace: str
    is_done: bool = False
    drop_in: str | None = None
    entries: tuple[Entry, ...] = ()

    def find(self, key: str) -> Entry | None:
        """The entry of a parameter."""
        return next((entry for entry in self.entries if entry.key == key), None)

    def with_entry(self, entry: Entry) -> Journal:
        """With this entry instead of that of the same key, or at the end."""
        kept = [entry if e.key == entry.key else e for e in self.entries]
        return msgspec.structs.replace(self, entries=tuple(kept if self.find(entry.key) else [*kept, entry]))


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one parameter."""

    key: str
    action: Action
    before: str
    after: str
    note: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What an apply or a rollback did, or would do."""

    is_dry_run: bool
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    @property
    def has_conflicts(self) -> bool:
        """Whether something was left alone because someone else changed it, or could not be set."""
        return any(change.action in ("conflict", "refused") for change in self.changes)


class SysctlStore:
    """The parameters of this host. ``drop_in`` None: not kept over a reboot (right in a namespace of its own)."""

    def __init__(self, system: System, *, journal: str = JOURNAL, drop_in: str | None = DROP_IN) -> None:
        self._system = system
        self._journal = journal
        self._drop_in = drop_in

    def apply(self, settings: Sequence[Setting], *, is_dry_run: bool = False) -> Outcome:
        """Set parameters that have another value. Raises UsageError in a container or another namespace's journal."""
        wanted = _checked(settings)
        with self._locked(is_dry_run):
            journal = self._load()
            self._refuse_strangers(journal)
            plan = [self._plan(setting, journal) for setting in wanted]
            if is_dry_run or not any(change.action == "set" for change in plan):
                return Outcome(is_dry_run=is_dry_run, changes=tuple(plan), notes=self._overrides(wanted))
            journal = journal or Journal(boot_id=self._boot_id(), namespace=self._namespace(), drop_in=self._drop_in)
            done: list[Change] = []
            for change in plan:
                if change.action != "set":
                    done.append(change)
                    continue
                ours = journal.find(change.key)
                old = change.before if ours is None else ours.old
                entry = Entry(
                    key=change.key,
                    old=old,
                    new=change.after,
                    at=datetime.now(UTC).isoformat(timespec="seconds"),
                    earlier=() if ours is None else tuple(sorted(ours.values)),
                )
                journal = msgspec.structs.replace(journal.with_entry(entry), is_done=False)
                self._save(journal)
                result = self._set(change)
                if result.action == "refused":
                    kept = [e for e in journal.entries if e.key != change.key]
                    journal = msgspec.structs.replace(journal, entries=tuple(kept))
                    journal = journal if ours is None else journal.with_entry(ours)
                else:
                    journal = journal.with_entry(msgspec.structs.replace(entry, held=result.after))
                self._save(journal)
                done.append(result)
            if journal.drop_in is not None and journal.entries:
                self._system.replace_file(journal.drop_in, drop_in_text(journal).encode())
            if journal.entries:
                self._save(msgspec.structs.replace(journal, is_done=True))
            else:
                self._system.remove_file(self._journal)
            return Outcome(is_dry_run=False, changes=tuple(done), notes=self._overrides(wanted))

    def rollback(self, *, is_dry_run: bool = False) -> Outcome:
        """Put back what is still ours, in reverse order, and forget the rest. Fine where nothing was applied."""
        with self._locked(is_dry_run):
            journal = self._load()
            if journal is None:
                return Outcome(is_dry_run=is_dry_run, changes=(), notes=("nothing was applied here",))
            self._refuse_strangers(journal)
            changes = tuple(self._restore(entry, is_dry_run=is_dry_run) for entry in reversed(journal.entries))
            notes: list[str] = []
            if journal.boot_id != self._boot_id():
                notes.append(
                    "the host was rebooted since: values that were never made permanent are gone by themselves"
                )
            if journal.drop_in is not None:
                notes += self._clear_drop_in(journal, is_dry_run=is_dry_run)
            if not is_dry_run:
                self._system.remove_file(self._journal)
            return Outcome(is_dry_run=is_dry_run, changes=changes, notes=tuple(notes))

    def _plan(self, setting: Setting, journal: Journal | None) -> Change:
        now = self._read(setting.key)
        if now is None:
            return Change(
                key=setting.key, action="gone", before="", after=setting.value, note="this kernel has no such parameter"
            )
        ours = None if journal is None else journal.find(setting.key)
        if now == setting.value or (ours is not None and ours.new == setting.value and now == ours.held):
            return Change(key=setting.key, action="kept", before=now, after=now)
        if ours is not None and now != ours.old and now not in ours.values:
            note = f"we had set {ours.new}; someone changed it since: `--rollback` first, or leave it"
            return Change(key=setting.key, action="conflict", before=now, after=now, note=note)
        return Change(key=setting.key, action="set", before=now, after=setting.value)

    def _set(self, change: Change) -> Change:
        try:
            self._system.write_setting(_file(change.key), change.after)
        except MissingCapability as fault:
            return msgspec.structs.replace(change, action="refused", after=change.before, note=str(fault))
        held = self._read(change.key)
        if held is None:
            return msgspec.structs.replace(change, action="refused", after=change.before, note="cannot be read back")
        if held == change.after:
            return change
        if held == change.before:
            return msgspec.structs.replace(
                change, action="refused", after=held, note=f"the kernel kept it, and did not take {change.after}"
            )
        return msgspec.structs.replace(
            change, action="clamped", after=held, note=f"the kernel made {held} of {change.after}"
        )

    def _restore(self, entry: Entry, *, is_dry_run: bool) -> Change:
        now = self._read(entry.key)
        if now is None:
            return Change(
                key=entry.key, action="gone", before="", after="", note="this kernel has no such parameter any more"
            )
        if now == entry.old:
            return Change(key=entry.key, action="kept", before=now, after=now)
        if now not in entry.values and not self._is_our_clamp(entry, now, is_dry_run=is_dry_run):
            note = f"we had set {entry.new}, before that it was {entry.old}; someone changed it since: left alone"
            return Change(key=entry.key, action="conflict", before=now, after=now, note=note)
        change = Change(key=entry.key, action="restored", before=now, after=entry.old)
        if is_dry_run:
            return change
        result = self._set(change)
        return change if result.action == "restored" else result

    def _is_our_clamp(self, entry: Entry, now: str, *, is_dry_run: bool) -> bool:
        """Whether the kernel makes ``now`` of what we wanted: then it is ours, though we ended before noting it."""
        if entry.held is not None or is_dry_run:
            return False
        try:
            self._system.write_setting(_file(entry.key), entry.new)
            if self._read(entry.key) == now:
                return True
            self._system.write_setting(_file(entry.key), now)
        except MissingCapability:
            return False
        return False

    def _clear_drop_in(self, journal: Journal, *, is_dry_run: bool) -> list[str]:
        assert journal.drop_in is not None
        text = self._system.read_text(journal.drop_in)
        if text is None:
            return []
        ours = {f"{entry.key} = {value}" for entry in journal.entries for value in entry.values}
        strange = [line for line in text.splitlines() if line.strip() and line not in ours and line != _HEAD]
        if not strange:
            if not is_dry_run:
                self._system.remove_file(journal.drop_in)
            return [f"{'would remove' if is_dry_run else 'removed'} {journal.drop_in}"]
        if not is_dry_run:
            self._system.replace_file(journal.drop_in, ("\n".join(strange) + "\n").encode())
        verb = "would be" if is_dry_run else "were"
        return [f"{journal.drop_in} also holds lines of someone else (conflict); only ours {verb} taken out"]

    def _overrides(self, wanted: Sequence[Setting]) -> tuple[str, ...]:
        """Files that come after our drop-in and say something else: they win at the next boot."""
        if self._drop_in is None:
            return ("not kept over a reboot: this is a network namespace of its own",)
        held = read_sysctl_files(HostView(self._system))
        notes = []
        for setting in wanted:
            path, value = held.get(setting.key, [("", setting.value)])[-1]
            is_later = path == "/etc/sysctl.conf" or path.rsplit("/", 1)[-1] > self._drop_in.rsplit("/", 1)[-1]
            if value != setting.value and is_later:
                notes.append(f"{path} sets {setting.key} to {value} and wins at the next boot: change it there too")
        return tuple(notes)

    def _refuse_strangers(self, journal: Journal | None) -> None:
        if journal is not None and journal.boot_id == self._boot_id() and journal.namespace != self._namespace():
            raise UsageError(
                f"{self._journal} was written in another network namespace ({journal.namespace})",
                expected=f"this one ({self._namespace()})",
                hint="run it where it was applied, or keep one journal per namespace with --state-dir",
            )

    @contextmanager
    def _locked(self, is_dry_run: bool) -> Iterator[None]:
        """One apply or rollback at a time; ends with the process."""
        if is_dry_run:
            yield
            return
        path = self._system.path(self._journal)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            raise MissingCapability(
                f"cannot keep the old values in {path.parent}: {fault.strerror}",
                hint="run as root, or choose another --state-dir",
            ) from fault
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UsageError(f"another apply or rollback holds {path}", hint="wait for it to end") from None
        finally:
            os.close(handle)

    def _load(self) -> Journal | None:
        content = self._system.read_bytes(self._journal)
        if content is None:
            return None
        try:
            journal = msgspec.json.decode(content, type=Journal)
        except msgspec.MsgspecError as fault:
            raise DataError(
                f"{self._journal} is damaged: {fault}", hint="restore the values by hand, then remove it"
            ) from fault
        if journal.schema > Journal.SCHEMA:
            raise DataError(f"{self._journal} has schema {journal.schema}", expected=f"{Journal.SCHEMA} or lower")
        return journal

    def _save(self, journal: Journal) -> None:
        self._system.replace_file(self._journal, msgspec.json.format(msgspec.json.encode(journal), indent=1) + b"\n")

    def _read(self, key: str) -> str | None:
        text = self._system.read_text(_file(key))
        return None if text is None else " ".join(text.split())

    def _boot_id(self) -> str:
        return self._system.read_text("/proc/sys/kernel/random/boot_id") or "unknown"

    def _namespace(self) -> str:
        # The target of this link is no path; its text names the namespace.
        try:
            return os.readlink(self._system.path("/proc/self/ns/net"))
        except OSError:
            return "unknown"


def is_first_namespace(system: System) -> bool:
    """Whether this process shares the network namespace of process 1; True where that may not be seen."""
    try:
        return os.readlink(system.path("/proc/self/ns/net")) == os.readlink(system.path("/proc/1/ns/net"))
    except OSError:
        return True


def refuse_in_container(view: HostView) -> None:
    """Raises UsageError in a container with a network of its own: its parameters end with it, the host's stay."""
    if view.container is not None and not view.physical_nics:
        raise UsageError(
            f"this is a container ({view.container}) with a network of its own",
            expected="the host, or a container with the host's network",
            hint="run it on the host; --this-namespace sets the container's own parameters all the same",
        )


def _checked(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    by_key: dict[str, Setting] = {}
    for setting in settings:
        if not setting.key.startswith(_ALLOWED) or ".." in setting.key or "/" in setting.key:
            raise UsageError(f"got kernel parameter {setting.key!r}", expected=f"one under {', '.join(_ALLOWED)}")
        if by_key.setdefault(setting.key, setting).value != setting.value:
            raise UsageError(f"got two values for {setting.key}: {by_key[setting.key].value} and {setting.value}")
    return tuple(by_key.values())


def _file(key: str) -> str:
    return f"/proc/sys/{key.replace('.', '/')}"


def drop_in_text(journal: Journal) -> str:
    """The file that sets the parameters at every boot."""
    return "\n".join([_HEAD, *(f"{entry.key} = {entry.new}" for entry in journal.entries)]) + "\n"
