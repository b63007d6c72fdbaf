"""Apply and roll back, ended by SIGKILL at every step in turn: what is left must be what rollback repairs.

Run as a script inside a network namespace, or imported. A step is one change to the world: a parameter written, a file
replaced, a file removed. A child ends itself before or after its n-th step, for every n.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from wirespeed.doctor.check import Setting
from wirespeed.doctor.sysctl import SysctlStore
from wirespeed.system import System


class MortalSystem(System):
    """Ends its process at one step."""

    def __init__(self, root: str | Path, step: int, *, is_before: bool) -> None:
        super().__init__(root)
        self.left = step
        self.is_before = is_before

    def _at(self, do: Callable[[], None]) -> None:
        self.left -= 1
        if self.left == 0 and self.is_before:
            os.kill(os.getpid(), signal.SIGKILL)
        do()
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_setting(self, name: str, text: str) -> None:
        self._at(lambda: super(MortalSystem, self).write_setting(name, text))

    def replace_file(self, name: str, content: bytes) -> None:
        self._at(lambda: super(MortalSystem, self).replace_file(name, content))

    def remove_file(self, name: str) -> None:
        self._at(lambda: super(MortalSystem, self).remove_file(name))


def ended_by_kill(work: Callable[[], object]) -> bool:
    """Run in a child; True where it was killed, False where it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as fault:
            sys.stderr.write(f"{type(fault).__name__}: {fault}\n")
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the child ended with {status}"
    return status == signal.SIGKILL


def read(root: str | Path, key: str) -> str:
    return " ".join((Path(root) / "proc/sys" / key.replace(".", "/")).read_text().split())


def sweep(
    root: str | Path, journal: str, drop_in: str | None, first: list[Setting], second: list[Setting]
) -> dict[str, int]:
    """Kill an apply, a second apply with other values, and a rollback at every step; roll back; compare. Counts kills."""
    keys = sorted({setting.key for setting in (*first, *second)})
    before = {key: read(root, key) for key in keys}
    kills = {"apply": 0, "second": 0, "rollback": 0}
    for is_before in (True, False):
        for stage in kills:
            for step in range(1, 100):
                mortal = SysctlStore(MortalSystem(root, step, is_before=is_before), journal=journal, drop_in=drop_in)
                plain = SysctlStore(System(root), journal=journal, drop_in=drop_in)
                if stage != "apply":
                    plain.apply(first)
                work = {
                    "apply": lambda m=mortal: m.apply(first),
                    "second": lambda m=mortal: m.apply(second),
                    "rollback": mortal.rollback,
                }[stage]
                was_killed = ended_by_kill(work)
                outcome = plain.rollback()
                where = f"{stage}, step {step}, {'before' if is_before else 'after'}"
                assert {key: read(root, key) for key in keys} == before, where
                assert not outcome.has_conflicts, (where, outcome)
                assert not (Path(root) / journal.lstrip("/")).exists(), where
                assert drop_in is None or not (Path(root) / drop_in.lstrip("/")).exists(), where
                if not was_killed:
                    break
                kills[stage] += 1
    return kills


if __name__ == "__main__":
    folder = sys.argv[1]
    print(
        json.dumps(
            sweep(
                "/", f"{folder}/sysctl.json", f"{folder}/90-wirespeed.conf",
                [Setting(key="net.ipv4.tcp_slow_start_after_idle", value="0"), Setting(key="net.ipv4.tcp_rmem", value="4096 131072 16777216")],
                [Setting(key="net.ipv4.tcp_rmem", value="4096 131072 8388608"), Setting(key="net.ipv4.tcp_fin_timeout", value="50")],
            )
        )
    )  # fmt: skip
