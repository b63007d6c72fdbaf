"""Generate ``serve/_generated`` from the .proto files: ``python src/wirespeed/serve/protos/generate.py``.

The generated modules are given a descriptor pool of their own: in the default one a process could not hold this server
and another package's stubs of the same protocol (the client that conformance is tested with) at the same time.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent
OUT = HERE.parent / "_generated"


def main() -> int:
    """Write the modules; the exit status of protoc."""
    files = [str(path) for path in sorted(HERE.glob("*.proto"))]
    status: int = protoc.main(["protoc", f"-I{HERE}", f"--python_out={OUT}", f"--pyi_out={OUT}", *files])
    for path in OUT.glob("*_pb2.py"):
        text = path.read_text(encoding="utf-8")
        text = text.replace("_descriptor_pool.Default()", "POOL")
        text = re.sub(r"(?m)^_sym_db = .*$", "from wirespeed.serve._generated import POOL", text)
        path.write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
