"""SQLite exports of Nsight Systems, written to its published schema ("SQLite Schema Reference" of its user guide)."""

from __future__ import annotations

import sqlite3

import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.measure.traces import analyse, read_trace

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,
    color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER,
    uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT);
CREATE TABLE NET_NIC_METRIC (
    start INTEGER NOT NULL, end INTEGER NOT NULL, globalId INTEGER NOT NULL, portId INTEGER NOT NULL,
    metricsListId INTEGER NOT NULL, metricsIdx INTEGER NOT NULL, value INTEGER NOT NULL);
CREATE TABLE TARGET_INFO_NETWORK_METRICS (
    metricsListId INTEGER NOT NULL, metricsIdx INTEGER NOT NULL, name TEXT NOT NULL, description TEXT NOT NULL,
    unit TEXT NOT NULL);
CREATE TABLE TARGET_INFO_NIC_INFO (
    GUID INTEGER NOT NULL, stateName TEXT NOT NULL, nicId INTEGER NOT NULL, name TEXT NOT NULL,
    deviceId INTEGER NOT NULL, vendorId INTEGER NOT NULL, linkLayer INTEGER NOT NULL);
CREATE TABLE NIC_ID_MAP (nicId INTEGER NOT NULL, globalId INTEGER NOT NULL);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
"""
US = 1000
PID = 4242
GLOBAL_PID = (1 << 56) | (PID << 24)


class Export:
    """An export under construction."""

    def __init__(self, path):
        self.path = path
        self.connection = sqlite3.connect(path)
        self.connection.executescript(SCHEMA)
        self.strings: dict[str, int] = {}

    def text(self, value):
        if value not in self.strings:
            self.strings[value] = len(self.strings) + 1
            self.connection.execute("INSERT INTO StringIds VALUES (?, ?)", (self.strings[value], value))
        return self.strings[value]

    def kernel(self, name, begin_us, end_us, *, device=0, pid=GLOBAL_PID):
        self.connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 1, NULL, 7, 1, ?, ?, ?, NULL)",
            (begin_us * US, end_us * US, device, pid, self.text(name), self.text(name)),
        )

    def range(self, text, begin_us, end_us, *, kind=59, by_id=False, json_text=None):
        self.connection.execute(
            "INSERT INTO NVTX_EVENTS (start, end, eventType, text, textId, globalTid, jsonText) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (begin_us * US, end_us * US, kind, None if by_id else text, self.text(text) if by_id else None,
             GLOBAL_PID | PID, json_text),
        )  # fmt: skip

    def nic(self, samples):
        """``(begin_us, end_us, bytes per ms sent)`` of mlx5_0."""
        add = self.connection.execute
        add("INSERT INTO TARGET_INFO_NIC_INFO VALUES (77, 'Local', 3, 'mlx5_0', 4129, 5555, 2)")
        add("INSERT INTO NIC_ID_MAP VALUES (3, 900)")
        for index, (name, unit) in enumerate(
            [("IB: Bytes sent", "bytes/ms"), ("IB: Bytes received", "bytes/ms"), ("IB: Send waits", "ticks/ms"),
             ("IPoIB: Bytes sent", "bytes/ms")]
        ):  # fmt: skip
            add("INSERT INTO TARGET_INFO_NETWORK_METRICS VALUES (0, ?, ?, '', ?)", (index, name, unit))
        for begin, end, sent in samples:
            for index, value in ((0, sent), (1, sent // 2), (2, 10**9), (3, 10**9)):
                add("INSERT INTO NET_NIC_METRIC VALUES (?, ?, 900, 1, 0, ?, ?)", (begin * US, end * US, index, value))

    def close(self):
        self.connection.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, '', 'Hostname', 0, 'node7')")
        self.connection.commit()
        self.connection.close()
        return self.path


@pytest.fixture
def export(tmp_path):
    return Export(tmp_path / "job.sqlite")


def two_steps(export):
    for begin in (0, 1000):
        export.range(f"step {begin // 1000}", begin, begin + 300, by_id=begin > 0)
        export.range(
            "ncclAllReduce", begin + 200, begin + 210, json_text='{"Message size [bytes]": 4194304, "nranks": 2}'
        )
        export.kernel("ampere_sgemm", begin, begin + 600)
        export.kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", begin + 400, begin + 900
        )
    export.range("step 2", 2000, 2001)


def test_an_export_is_split_like_a_kineto_trace_of_the_same_job(export):
    two_steps(export)
    (timeline,) = read_trace(export.close())
    record = analyse([timeline], nic_bit_per_s=100e9)
    (rank,) = record.ranks
    assert (timeline.host, timeline.device) == ("node7", f"GPU 0 of process {PID}")
    # Steps last until the next range begins: 0 to 1000 and 1000 to 2000 us; nothing ran in the third.
    assert (rank.num_steps, rank.window_s) == (2, pytest.approx(2e-3))
    assert rank.compute_s == pytest.approx(1.2e-3)
    assert rank.communication_s == pytest.approx(1e-3)
    assert rank.overlap_s == pytest.approx(0.4e-3)
    assert rank.exposed_s == pytest.approx(0.6e-3)
    (collective,) = record.collectives
    assert (collective.collective, collective.num_ranks, collective.count) == ("all_reduce", 2, 2)
    assert collective.busbw_bit_per_s == pytest.approx(67.108864e9)


def test_counted_nic_traffic_is_weighted_by_the_time_it_shares_with_collectives(export):
    two_steps(export)
    # 10 MB/ms during the collectives (400 to 900, 1400 to 1900 us), 1 MB/ms otherwise.
    edges = [(0, 400, 10**6), (400, 900, 10**7), (900, 1400, 10**6), (1400, 1900, 10**7)]
    export.nic(edges)
    record = analyse(read_trace(export.close()), nic_bit_per_s=200e9)
    (nic,) = record.nics
    assert nic.nic == "mlx5_0"
    assert nic.sent_bit_per_s == pytest.approx(80e9)  # 10^7 bytes/ms * 1000 * 8
    assert nic.received_bit_per_s == pytest.approx(40e9)
    assert nic.sent_outside_bit_per_s == pytest.approx(8e9)
    assert nic.saturation == pytest.approx(0.4)
    assert nic.covered_s == pytest.approx(1e-3)
    assert any(finding.startswith("mlx5_0 (job.sqlite): 40 % of its line rate") for finding in record.findings)


def test_devices_and_processes_are_ranks_of_their_own(export):
    export.kernel("gemm", 0, 10)
    export.kernel("gemm", 0, 10, device=1)
    export.kernel("gemm", 0, 10, pid=(1 << 56) | ((PID + 1) << 24))
    assert [t.device for t in read_trace(export.close())] == [
        f"GPU 0 of process {PID}",
        f"GPU 1 of process {PID}",
        f"GPU 0 of process {PID + 1}",
    ]


def test_sizes_are_left_out_where_ranges_and_kernels_do_not_match(export):
    export.range("ncclAllReduce", 0, 1, json_text='{"Message size [bytes]": 8}')
    for begin in (0, 10):
        export.kernel("ncclDevKernel_AllReduce_Sum_f32", begin, begin + 5)
    (timeline,) = read_trace(export.close())
    assert [c.size_bytes for c in timeline.collectives] == [None, None]


def test_steps_of_another_name_are_found_by_a_pattern(export):
    export.range("my loop 1", 0, 10)
    export.kernel("gemm", 0, 10)
    path = export.close()
    assert read_trace(path)[0].steps == ()
    assert len(read_trace(path, steps=r"my loop \d+")[0].steps) == 1
    with pytest.raises(UsageError, match="regular expression"):
        read_trace(path, steps="(")


def test_an_export_with_nothing_in_it_says_how_to_make_one(tmp_path):
    path = tmp_path / "empty.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(DataError, match="nsys export --type sqlite"):
        read_trace(path)


def test_a_report_that_was_not_exported_says_how_to(tmp_path):
    path = tmp_path / "job.nsys-rep"
    path.write_bytes(b"QDSTRM....")
    with pytest.raises(DataError, match=r"nsys export --type sqlite --output job\.sqlite job\.nsys-rep"):
        read_trace(path)


def test_a_damaged_export_is_an_error(tmp_path):
    path = tmp_path / "bad.sqlite"
    path.write_bytes(b"SQLite format 3\x00" + b"\x01" * 200)
    with pytest.raises(DataError, match="cannot read"):
        read_trace(path)
