"""Traffic classes in a lab: what carries the DSCP leaves first, the rest does not starve, and training carries it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab_tools import python

from wirespeed.lab import Lab, LabSpec
from wirespeed.lab.layout import HEADER_EFFICIENCY

DSCP = 26
RATE_BIT_PER_S = 200e6

# Counts what each of two connections brings within the time in which both send; the first byte tells them apart.
RECEIVE = """
import socket, threading, time
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
got = {}
def take(connection):
    name = connection.recv(1)
    buffer = bytearray(1 << 18)
    got[name] = []
    while (size := connection.recv_into(buffer)):
        got[name].append((time.monotonic(), size))
threads = [threading.Thread(target=take, args=(server.accept()[0],)) for _ in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
begin = max(arrived[0][0] for arrived in got.values()) + 0.5
until = min(arrived[-1][0] for arrived in got.values())
for name in (b"m", b"u"):
    print(8 * sum(size for moment, size in got[name] if begin <= moment < until) / (until - begin))
"""
SEND = """
import socket, sys, threading, time
stop = time.monotonic() + 2.5
def flow(name, dscp):
    connection = socket.create_connection((sys.argv[1], 5000), timeout=20)
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
    connection.sendall(name)
    data = bytes(1 << 16)
    while time.monotonic() < stop:
        connection.sendall(data)
flows = [threading.Thread(target=flow, args=arguments) for arguments in ((b"m", int(sys.argv[2])), (b"u", 0))]
[f.start() for f in flows]; [f.join() for f in flows]
"""


def both_rates(lab: Lab, dscp: int) -> tuple[float, float]:
    """Goodput of two flows from h0 to h1 that want all of the link, as shares of it: the one with a DSCP, the other."""
    server = lab.popen("h1", python(RECEIVE), stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    done = lab.exec("h0", python(SEND, "h1", dscp), timeout_s=60.0)
    assert done.returncode == 0, done.stderr
    marked, unmarked = map(float, server.communicate(timeout=60)[0].split())
    goodput_bit_per_s = RATE_BIT_PER_S * HEADER_EFFICIENCY
    return marked / goodput_bit_per_s, unmarked / goodput_bit_per_s


def test_what_carries_the_dscp_goes_first_and_the_rest_does_not_starve() -> None:
    with Lab(LabSpec(hosts=2, rate_bit_per_s=RATE_BIT_PER_S, first_dscp=DSCP)) as lab:
        assert [(h.sends_bit_per_s, h.receives_bit_per_s) for h in lab.status().hosts] == [(200e6, 200e6)] * 2
        marked, unmarked = both_rates(lab, DSCP)
        # 95 % of the link belong to the first class. TCP leaves a little of what it is given.
        assert 0.8 < marked < 0.99
        assert 0.02 < unmarked < 0.2
        host = lab.status().hosts[0]
        assert host.sent_by_class is not None
        first, rest = host.sent_by_class
        # 2.5 s of 200 Mbit/s are 62 MB.
        assert first > 0.75 * 62e6 > rest
        other_dscp, unmarked = both_rates(lab, 46)
        assert other_dscp + unmarked < 1.03  # each alone is the link's, headers counted
        assert unmarked > 0.2, "another mark is no mark"


def test_a_rate_that_is_changed_holds_for_both_classes() -> None:
    with Lab(LabSpec(hosts=2, rate_bit_per_s=1e9, first_dscp=DSCP)) as lab:
        lab.fault("h1", "rate", rate_bit_per_s=RATE_BIT_PER_S)
        assert [h.receives_bit_per_s for h in lab.status().hosts] == [1e9, 200e6]
        marked, unmarked = both_rates(lab, DSCP)
        assert marked + unmarked < 1.03
        assert marked > 4 * unmarked
        lab.fault("h1", "heal")
        assert [h.receives_bit_per_s for h in lab.status().hosts] == [1e9, 1e9]


TRAIN = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import wirespeed.train
from wirespeed.spec.strategy import Strategy

folder = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
session = wirespeed.train.attach(ddp, optimizer, strategy="dense", dscp=int(sys.argv[2]) or None)

def take(num_steps):
    for _ in range(num_steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()

def tell(name):
    # The test looks at the links' counters while all ranks wait.
    dist.barrier()
    if rank == 0:
        (folder / name).write_text(json.dumps(dict(stated=session.wire[-1][0], text=str(session.report()))))
    while not (folder / f"{name}-seen").exists():
        time.sleep(0.01)
"""
PHASES = """
take(3)
tell("marked")
take(10)
tell("after dense")
session.switch(Strategy.parse("int8"))
take(10)
tell("after int8")
session.mark_traffic(0)
take(10)
tell("after unmarked")
dist.barrier()
os._exit(0)
"""


class Observer:
    """Reads the links' counters whenever rank 0 has told something."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        self.told: dict[str, tuple[int, int, dict]] = {}

    def look(self) -> str | None:
        """For ``should_stop``: never stops the run."""
        for name in ("marked", "after dense", "after int8", "after unmarked"):
            path = self._folder / name
            if path.exists() and name not in self.told and path.read_text().endswith("}"):
                by_class = self._lab.status().hosts[0].sent_by_class
                assert by_class is not None
                self.told[name] = (*by_class, json.loads(path.read_text()))
                (self._folder / f"{name}-seen").touch()
        return None


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("by", ["attach", "launch"])
def test_training_and_nothing_else_is_in_the_first_class(by: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(TRAIN + PHASES)
    folder = tmp_path / "told"
    folder.mkdir()
    program = [sys.executable, str(tmp_path / "program.py"), str(folder)]
    if by == "launch":  # from outside, which looks for new sockets every second
        program[1:1] = ["-m", "wirespeed", "launch", "--no-bind", "--dscp", str(DSCP), "--", sys.executable]
        (tmp_path / "program.py").write_text(TRAIN + "take(3)\ntime.sleep(3)\n" + PHASES)
    command = [*program, str(DSCP) if by == "attach" else "0"]
    with Lab(LabSpec(hosts=2, rate_bit_per_s=1e9, first_dscp=DSCP)) as lab:
        observer = Observer(lab, folder)
        end = lab.run(command, timeout_s=120, should_stop=observer.look)
    assert end.returncode == 0, end.tails
    told = observer.told

    def moved(since: str, until: str) -> tuple[int, int, int]:
        """Bytes in the first class, in the rest, and stated."""
        one, other = told[since], told[until]
        return other[0] - one[0], other[1] - one[1], other[2]["stated"] - one[2]["stated"]

    first, rest, stated = moved("marked", "after dense")
    assert stated > 10_000_000
    # 66 bytes of headers per 1448 of payload (4.6 %), and acknowledgements of what comes in.
    assert stated <= first < 1.1 * stated
    assert rest < 0.02 * stated
    if by == "attach":
        assert "DSCP 26 on" in told["marked"][2]["text"]
        first, rest, stated = moved("after dense", "after int8")
        assert 0.95 * stated < first < 1.15 * stated + 20_000, "the groups that int8 made are marked too"
        assert rest < 0.02 * stated + 2_000
        first, rest, stated = moved("after int8", "after unmarked")
        assert first < 0.02 * stated + 2_000
        assert rest > 0.95 * stated
