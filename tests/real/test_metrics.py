"""Metrics of a real session, scraped over HTTP as Prometheus does."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

from ranks import fine

pytestmark = pytest.mark.torch

PROGRAM = """
from urllib.request import urlopen
from prometheus_client.parser import text_string_to_metric_families
from wirespeed.train.metrics import serve_metrics

model = DDP(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = wirespeed.train.attach(model, optimizer, strategy="int8")
end = serve_metrics(session, port=0)
for step in range(6):
    x, y = batch(step)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
page = urlopen(f"http://127.0.0.1:{end.port}/metrics", timeout=20).read().decode()
samples = {}
for family in text_string_to_metric_families(page):
    for s in family.samples:
        samples.setdefault(s.name, []).append([s.labels, s.value])
parts = session.clock.steps()
end()
report(samples=samples, residual=session.residual_bytes, forward=sum(p.forward_s for p in parts[:-1]), wire=session.wire[-1][0])
"""


def test_a_scrape_tells_what_the_session_measured(tmp_path):
    for rank, told in enumerate(fine(PROGRAM, tmp_path)):
        samples = told["samples"]
        ((labels, steps),) = samples["wirespeed_steps_total"]
        assert labels["rank"] == str(rank)
        # The first step has no beginning that was seen, and the newest is still open.
        assert steps in (4, 5)
        seconds = {labels["part"]: value for labels, value in samples["wirespeed_step_seconds_total"]}
        assert seconds["forward"] == pytest.approx(told["forward"])
        sent = {labels["counted"]: value for labels, value in samples["wirespeed_sent_bytes_total"]}
        assert sent["stated"] == told["wire"] > 0
        ((labels, one),) = samples["wirespeed_session_info"]
        assert (labels["strategy"], labels["fidelity"], labels["num_ranks"], one) == ("int8", "compressed", "2", 1)
        ((_, held),) = samples["wirespeed_residual_bytes"]
        assert held == told["residual"] > 0


PORT = """
import socket
from wirespeed.errors import MissingCapability
from wirespeed.train.metrics import serve_metrics

model = DDP(make_model())
session = wirespeed.train.attach(model, strategy="dense")
with socket.create_server(("127.0.0.1", 0)) as taken:
    try:
        serve_metrics(session, port=taken.getsockname()[1] - int(os.environ["LOCAL_RANK"]))
        report(error=None)
    except MissingCapability as fault:
        report(error=str(fault))
"""


def test_a_port_that_is_taken_is_named(tmp_path):
    for told in fine(PORT, tmp_path):
        assert "cannot serve metrics on 127.0.0.1:" in told["error"]
        assert "every rank of a host needs one of its own" in told["error"]


RANGES = """
import threading
from wirespeed.train import ranges

class Recorded:
    def __init__(self):
        self.names, self.depth = [], threading.local()
    def push(self, name):
        self.names.append(name)
        self.depth.value = getattr(self.depth, "value", 0) + 1
    def pop(self):
        self.depth.value -= 1
        assert self.depth.value >= 0

backend = Recorded()
ranges.open_backend = lambda: backend
model = DDP(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wirespeed.train.attach(model, optimizer, strategy="int8")
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
report(names=backend.names, open=backend.depth.value)
"""


def test_a_sessions_steps_and_collectives_become_ranges(tmp_path):
    for told in fine(RANGES, tmp_path, env={"WIRESPEED_NVTX": "1"}):
        names = set(told["names"])
        assert {"step 1", "forward", "backward", "exposed", "optimizer"} <= names
        assert {"stage 0 of bucket 0", "all_to_all of bucket 0", "all_gather of bucket 0"} <= names
        assert told["open"] == 2  # the step that has just begun, and its part
