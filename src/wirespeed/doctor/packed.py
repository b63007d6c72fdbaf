"""The checks of one host as one file: a zip of this package's standard-library part that Python runs as it is.

Made in memory from the installed sources, sent to hosts over ssh and removed there. It runs on Python 3.9 and later:
before 3.10 dataclasses know no ``kw_only``, so its first lines make them ignore it (every class here is made with
keywords only). The answer is one line behind ``MARK``, since login scripts may write to stdout too.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from wirespeed.doctor.examine import Question, as_document, examine
from wirespeed.errors import InternalError, WirespeedError
from wirespeed.system import System

MARK = "wirespeed-examination "
MIN_PYTHON = (3, 9)
MODULES = (
    "__init__", "errors", "system", "units", "doctor.__init__", "doctor.advice", "doctor.check",
    "doctor.counter_rules", "doctor.counters", "doctor.cpu_lists", "doctor.examine", "doctor.fabric_manager",
    "doctor.gpu", "doctor.host",
    "doctor.inventory", "doctor.launch", "doctor.launch_rules", "doctor.network", "doctor.nic", "doctor.packed",
    "doctor.pci", "doctor.rank_ports", "doctor.rdma", "doctor.recorded", "doctor.roce", "doctor.sockets", "doctor.tcp",
    "doctor.traffic_class", "doctor.watched",
)  # fmt: skip
_MAIN = """\
import sys
if sys.version_info < {version}:
    sys.exit("python %d.%d is too old: {version} or later is needed" % sys.version_info[:2])
if sys.version_info < (3, 10):
    import dataclasses
    _dataclass = dataclasses.dataclass
    dataclasses.dataclass = lambda cls=None, **options: _dataclass(
        cls, **{{name: value for name, value in options.items() if name not in ("kw_only", "slots")}}
    )
from wirespeed.doctor.packed import main
sys.exit(main(sys.argv[1:]))
"""


def pack() -> bytes:
    """The zipapp. The same sources give the same bytes."""
    package = Path(__file__).parent.parent
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "__main__.py", _MAIN.format(version=MIN_PYTHON).encode())
        for name in MODULES:
            path = name.replace(".", "/") + ".py"
            try:
                content = (package / path).read_bytes()
            except OSError as fault:
                raise InternalError(
                    f"cannot pack {path}: {fault.strerror}", hint="wirespeed is installed incompletely"
                ) from fault
            _add(archive, f"wirespeed/{path}", content)
    return b"#!/usr/bin/env python3\n" + held.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content)


def argument(question: Question) -> str:
    """The packed file's one argument."""
    return json.dumps(asdict(question))


def main(arguments: Sequence[str]) -> int:
    """Examine this host as the one argument says, and write the marked line to stdout."""
    try:
        wanted = json.loads(arguments[0]) if arguments else {}
        lists = {name: tuple(value) for name, value in wanted.items() if isinstance(value, list)}
        examination = examine(System(), Question(**{**wanted, **lists}))
    except WirespeedError as fault:
        sys.stderr.write(f"wirespeed: {fault}\n")
        return fault.exit_code
    sys.stdout.write(f"{MARK}{json.dumps(as_document(examination))}\n")
    return 0
