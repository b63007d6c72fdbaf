"""A host in one file: everything the checks asked of it and what it answered, to be looked at elsewhere.

``Recorder`` is a ``System`` that remembers every answer; ``RecordedSystem`` gives them again. Answers are kept by the
name that was asked, so links need not be followed. What was never asked is absent in a replay: a check that is newer
than a recording may say less of it than of the host itself. Of environments only network variables are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wirespeed.errors import DataError, MissingCapability
from wirespeed.system import SEEN_VARIABLES, CommandResult, Problem, Reading, System

KIND, SCHEMA = "recorded_host", 1
MAX_RECORDING_BYTES = 64 * 1024**2


def _empty() -> dict[str, Any]:
    return {
        "kind": KIND, "schema": SCHEMA, "about": "", "files": {}, "problems": {}, "binaries": {}, "folders": {},
        "links": {}, "exists": {}, "commands": {}, "environ": {}, "process_environs": {}, "tcp_diagnostics": {},
        "watched": {}, "sockets": {},
    }  # fmt: skip


def _command_key(command: Sequence[str]) -> str:
    return " ".join(command)


class Recorder(System):
    """This host, remembered."""

    def __init__(self, root: str | Path = "/") -> None:
        super().__init__(root)
        self.held = _empty()

    def read(self, name: str) -> Reading:
        """As System, remembered."""
        reading = super().read(name)
        if reading.text is not None:
            self.held["files"][name] = reading.text
        else:
            self.held["problems"][name] = reading.problem
        return reading

    def read_bytes(self, name: str) -> bytes | None:
        """As System, remembered; environments of processes are not, see ``process_environ``."""
        content = super().read_bytes(name)
        if content is not None and not name.endswith("/environ"):
            self.held["binaries"][name] = content.hex()
        return content

    def list_dir(self, name: str) -> tuple[str, ...]:
        """As System, remembered."""
        names = super().list_dir(name)
        if names:
            self.held["folders"][name] = list(names)
        return names

    def exists(self, name: str) -> bool:
        """As System, remembered."""
        found = super().exists(name)
        self.held["exists"][name] = found
        return found

    def real_path(self, name: str) -> str | None:
        """As System, remembered."""
        target = super().real_path(name)
        if target is not None:
            self.held["links"][name] = target
        return target

    def environ(self) -> Mapping[str, str]:
        """As System, but of ``SEEN_VARIABLES`` only."""
        held = {name: value for name, value in super().environ().items() if name.startswith(SEEN_VARIABLES)}
        self.held["environ"] = held
        return held

    def process_environ(self, pid: int) -> Mapping[str, str] | None:
        """As System, remembered."""
        held = super().process_environ(pid)
        if held:
            self.held["process_environs"][str(pid)] = dict(held)
        return held

    def process_sockets(self, pid: int) -> frozenset[int] | None:
        """As System, and noted."""
        found = super().process_sockets(pid)
        if found is not None:
            self.held["sockets"][str(pid)] = sorted(found)
        return found

    def tcp_diagnostics(self, family: int) -> bytes | None:
        """As System, remembered."""
        answer = super().tcp_diagnostics(family)
        if answer is not None:
            self.held["tcp_diagnostics"][str(family)] = answer.hex()
        return answer

    def run(self, command: Sequence[str], *, timeout_s: float = 10.0, stdin: bytes | None = None) -> CommandResult:
        """As System, remembered."""
        key = _command_key(command)
        try:
            done = super().run(command, timeout_s=timeout_s, stdin=stdin)
        except MissingCapability as fault:
            self.held["commands"][key] = {"missing": fault.problem}
            raise
        self.held["commands"][key] = {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        return done

    def to_json(self) -> bytes:
        """The recording as a file's content."""
        return json.dumps(self.held, indent=1, sort_keys=True).encode() + b"\n"


class RecordedSystem(System):
    """A host as it was recorded. Folders that were not listed are made of the names of the files below them."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        super().__init__("/nonexistent")
        self._held = {**_empty(), **held}
        self._folders: dict[str, set[str]] = {name: set(names) for name, names in self._held["folders"].items()}
        for part in ("files", "problems", "binaries", "links", "exists"):
            for name, answer in self._held[part].items():
                if answer is not False and answer != "absent":
                    self._add(name)

    @classmethod
    def load(cls, path: str | Path) -> RecordedSystem:
        """Read a recording. Raises DataError where it is none."""
        try:
            if Path(path).stat().st_size > MAX_RECORDING_BYTES:
                raise DataError(f"{path} is over {MAX_RECORDING_BYTES} bytes", expected="a recorded host")
            held = json.loads(Path(path).read_bytes())
        except OSError as fault:
            raise DataError(f"cannot read {path}: {fault.strerror or fault}") from fault
        except (ValueError, RecursionError) as fault:
            raise DataError(
                f"{path} is no recorded host: {fault}", expected="JSON of `doctor host --record`"
            ) from fault
        if not isinstance(held, dict) or held.get("kind") != KIND:
            raise DataError(f"{path} is no recorded host", expected=f'JSON with "kind": "{KIND}"')
        if held.get("schema") != SCHEMA:
            raise DataError(f"{path} has schema {held.get('schema')!r}", expected=f"schema {SCHEMA}")
        shape = {key: type(value) for key, value in _empty().items()}
        wrong = [key for key, kind in shape.items() if key in held and not isinstance(held[key], kind)]
        if wrong:
            raise DataError(f"{path} is damaged at {wrong[0]!r}", expected=f"a {shape[wrong[0]].__name__}")
        return cls(held)

    @property
    def watched(self) -> dict[str, Any] | None:
        """Two readings of the counters (seconds, before, after), where the recording has them."""
        held = self._held["watched"]
        return dict(held) if {"seconds", "before", "after"} <= set(held) else None

    def _add(self, name: str) -> None:
        parts = name.strip("/").split("/")
        for depth in range(len(parts)):
            self._folders.setdefault("/" + "/".join(parts[:depth]), set()).add(parts[depth])

    def read(self, name: str) -> Reading:
        """The recorded text or problem; absent where it was never asked."""
        text = self._held["files"].get(name)
        if text is not None:
            return Reading(text=str(text).rstrip("\n"))
        problem: Problem = self._held["problems"].get(name, "unreadable" if name in self._folders else "absent")
        return Reading(text=None, problem=problem)

    def read_bytes(self, name: str) -> bytes | None:
        """The recorded bytes, or those of a recorded text."""
        content = self._held["binaries"].get(name)
        if content is not None:
            return bytes.fromhex(content)
        text = self._held["files"].get(name)
        return None if text is None else str(text).encode()

    def list_dir(self, name: str) -> tuple[str, ...]:
        """Names in a folder, sorted."""
        return tuple(sorted(self._folders.get(name.rstrip("/") or "/", ())))

    def exists(self, name: str) -> bool:
        """What was recorded, else whether anything at or below that name was."""
        said = self._held["exists"].get(name)
        if said is not None:
            return bool(said)
        return any(name in self._held[part] for part in ("files", "binaries", "links")) or name in self._folders

    def real_path(self, name: str) -> str | None:
        """The recorded target."""
        target = self._held["links"].get(name)
        return None if target is None else str(target)

    def environ(self) -> Mapping[str, str]:
        """The recorded variables."""
        return dict(self._held["environ"])

    def process_environ(self, pid: int) -> Mapping[str, str] | None:
        """The recorded variables of a process."""
        held = self._held["process_environs"].get(str(pid))
        return None if held is None else dict(held)

    def process_sockets(self, pid: int) -> frozenset[int] | None:
        """As recorded; None where it was not, as for another user's process."""
        held = self._held["sockets"].get(str(pid))
        return None if held is None else frozenset(held)

    def tcp_diagnostics(self, family: int) -> bytes | None:
        """The recorded answer."""
        answer = self._held["tcp_diagnostics"].get(str(family))
        return None if answer is None else bytes.fromhex(answer)

    def run(self, command: Sequence[str], *, timeout_s: float = 10.0, stdin: bytes | None = None) -> CommandResult:
        """The recorded result. Raises MissingCapability where the program was missing or never run."""
        held = self._held["commands"].get(_command_key(command))
        if held is None or "missing" in held:
            raise MissingCapability(f"program {command[0]!r} is not installed")
        return CommandResult(
            returncode=held.get("returncode", 0), stdout=held.get("stdout", ""), stderr=held.get("stderr", "")
        )
