"""Traces that torch.profiler made here, of a DDP job on gloo: what the profiler's own table says is what is read."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from ranks import fine

from wirespeed.cli.main import app
from wirespeed.measure.traces import analyse, read_trace

pytestmark = pytest.mark.torch

PROGRAM = """
import time
from torch.profiler import ProfilerActivity, profile, schedule

model = DDP(make_model((256, 512, 512, 512, 8)), bucket_cap_mb=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
totals = {}

def done(profiler):
    profiler.export_chrome_trace(f"{sys.argv[1]}/rank{rank}.json.gz")
    for event in profiler.key_averages():
        if event.key.startswith("gloo:"):
            totals[event.key] = event.count

with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=2, active=3), record_shapes=True,
             on_trace_ready=done) as profiler:
    for step in range(5):
        x, y = batch(step, sizes=(256, 8))
        if rank == 1:
            time.sleep(0.25)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        profiler.step()
report(totals=totals, num_elements=sum(p.numel() for p in model.parameters()))
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    return folder, fine(PROGRAM, folder, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})


def test_a_real_trace_tells_steps_collectives_and_their_sizes(traced):
    folder, told = traced
    for rank, own in enumerate(told):
        (timeline,) = read_trace(folder / f"rank{rank}.json.gz")
        assert (timeline.rank, timeline.num_ranks, len(timeline.steps)) == (rank, 2, 3)
        reduced = [c for c in timeline.collectives if c.collective == "all_reduce"]
        assert len(reduced) == own["totals"]["gloo:all_reduce"]
        # Every step reduces all gradients, fp32.
        assert sum(c.size_bytes for c in reduced) == 3 * 4 * own["num_elements"]
        activity = analyse([timeline]).ranks[0]
        assert activity.window_s == pytest.approx(activity.compute_s + activity.exposed_s + activity.idle_s)
        assert 0 < activity.communication_s <= activity.window_s


def test_the_rank_that_sleeps_is_the_one_that_the_other_waits_for(traced):
    folder, _ = traced
    record = analyse([t for rank in (0, 1) for t in read_trace(folder / f"rank{rank}.json.gz")])
    # Rank 1 sleeps 250 ms of each of three steps. What a busy machine takes from rank 0, it waits less.
    assert record.ranks[0].waiting_s - record.ranks[1].waiting_s > 0.45
    assert any(finding.startswith("rank 1 is late: rank 0 waits") for finding in record.findings)


def test_the_command_reads_a_folder_of_traces_and_prints_one_document(traced):
    folder, _ = traced
    for stale in folder.glob("result-*.json"):
        stale.unlink()
    result = CliRunner().invoke(app, ["profile", "--trace", str(folder), "--nic-rate", "10gbit", "--json"])
    assert result.exit_code == 0, result.output
    held = json.loads(result.stdout)
    assert (held["kind"], [rank["rank"] for rank in held["ranks"]]) == ("traces", [0, 1])
    shown = CliRunner().invoke(app, ["profile", "--trace", *(str(folder / f"rank{r}.json.gz") for r in (0, 1))])
    assert shown.exit_code == 0
    assert "rank 1 is late" in shown.stdout
