"""Read the text of perftest (``ib_write_bw`` and its siblings): rate or latency by size, device and link layer.

MB/sec are 2^20 bytes there, as its source counts them; Gb/sec are 10^9 bits.
"""

from __future__ import annotations

import re

from wirespeed.doctor.measurements import Measurement, Point

STARTS = (b"#bytes", b'"BW_average"', b'"t_typical"')
MAX_ROWS = 10_000

_TITLE = re.compile(
    rb"(RDMA_Write|RDMA_Read|Send|Write|Read|Atomic\w*) (?:Bidirectional )?(?:Post List )?(BW|Latency) Test"
)
_DEVICE = re.compile(rb"Device\s*:\s*([\w.\-]+)")
_LAYER = re.compile(rb"Link type\s*:\s*(\w+)")
_QPS = re.compile(rb"Number of qps\s*:\s*(\d+)")
_GPU = re.compile(
    rb"initializing CUDA|use_cuda|use_rocm|creating CUDA Ctx|allocated GPU buffer|cuMemAlloc|Picking device No"
)
_HEADER = re.compile(rb"#bytes\s+#iterations\s+(BW peak|t_min)\[(\S+?)\]")
_ROW = re.compile(
    rb"(?:^|[\s>:\]])(\d{1,15})\s+(\d{1,12})\s+(\d+\.\d+)\s+(\d+\.\d+)(?:\s+(\d+\.\d+))?(?:\s+(\d+\.\d+))?"
)


_JSON = re.compile(rb'"(MsgSize|BW_average|BW_peak|t_typical|t_avg|Device|Link_type|test|unit)"\s*:\s*"?([^",\n}]+)')
"""Of ``--out_json``, which is not valid JSON in older builds (perftest#216): so it is read line by line."""


class PerftestReader:
    """Takes the lines of a log that holds a table of perftest."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.found: list[Measurement] = []
        self.progress = 0
        self._test = ""
        self._device = ""
        self._layer = ""
        self._streams: int | None = None
        self._uses_gpu = False
        self._unit: bytes | None = None
        self._size = 0
        self._is_latency = False
        self._line = 1
        self._points: list[Point] = []

    def take(self, number: int, line: bytes) -> None:
        """One line of any kind."""
        if (found := _TITLE.search(line)) is not None:
            self.close()
            name = found[1].decode(errors="replace").lower().replace("rdma_", "")
            self._test = f"{name}_{'bw' if found[2] == b'BW' else 'lat'}"
            self._device, self._layer, self._streams = "", "", None
        elif (found := _HEADER.search(line)) is not None:
            self.close()
            self._unit, self._is_latency, self._line = found[2], found[1] == b"t_min", number
        elif (found := _DEVICE.search(line)) is not None:
            self._device = found[1].decode(errors="replace")
        elif (found := _LAYER.search(line)) is not None:
            self._layer = found[1].decode(errors="replace")
        elif (found := _QPS.search(line)) is not None:
            self._streams = int(found[1])
        elif self._unit is not None and (found := _ROW.search(line)) is not None and len(self._points) < MAX_ROWS:
            self._take_row(found)
        elif b'":' in line or b'" :' in line:
            for name, value in _JSON.findall(line):
                self._take_field(name, value.strip())
        elif _GPU.search(line) is not None:
            self._uses_gpu = True  # said before the title

    def _take_field(self, name: bytes, value: bytes) -> None:
        """One field of the JSON. Rates are in Gbit/s there, unless the run was without --report_gbits and says MB."""
        text = value.decode(errors="replace")
        if name == b"Device":
            self._device = text
        elif name == b"Link_type":
            self._layer = text
        elif name == b"test":
            found = _TITLE.search(value + b" Test") or _TITLE.search(value)
            self._test = "" if found is None else f"{found[1].decode().lower().replace('rdma_', '')}_bw"
        elif name == b"unit":
            self._unit = value
        elif name == b"MsgSize" and value.isdigit():
            self._size = int(value)
        elif self._size and re.fullmatch(rb"\d+(?:\.\d+)?", value) is not None and len(self._points) < MAX_ROWS:
            self.progress += 1
            if name == b"BW_average":
                factor = 8 * 2.0**20 if self._unit is not None and self._unit.lower().startswith(b"mb") else 1e9
                self._points.append(Point(size_bytes=self._size, bit_per_s=float(value) * factor))
            elif name == b"t_typical":
                self._is_latency = True
                self._points.append(Point(size_bytes=self._size, time_s=float(value) * 1e-6))

    def _take_row(self, found: re.Match[bytes]) -> None:
        self.progress += 1
        size = int(found[1])
        if self._is_latency:  # bytes, iterations, t_min, t_max, t_typical, t_avg
            typical = found[5] if found[5] is not None else found[3]
            self._points.append(Point(size_bytes=size, time_s=float(typical) * 1e-6))
            return
        factor = 1e9 if self._unit is not None and self._unit.lower().startswith(b"gb") else 8 * 2.0**20
        self._points.append(Point(size_bytes=size, bit_per_s=float(found[4]) * factor))

    def close(self) -> None:
        """The log, or one table of it, has ended."""
        if self._points:
            self.found.append(
                Measurement(
                    tool="perftest",
                    test=self._test or ("latency" if self._is_latency else "bandwidth"),
                    where=f"{self._source}:{self._line}",
                    points=tuple(self._points),
                    streams=self._streams,
                    device=self._device,
                    layer=self._layer,
                    uses_gpu=self._uses_gpu,
                )
            )
            self._uses_gpu = False
        self._points, self._unit = [], None
