"""Replays over loopback: real DDP and sessions, sleeping layers, every strategy in one process group."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec
import pytest

torch = pytest.importorskip("torch")

from wirespeed.errors import UsageError  # noqa: E402
from wirespeed.plan.models import load_model, replay_workload  # noqa: E402
from wirespeed.records import from_json, to_json  # noqa: E402
from wirespeed.sim.training import fill_buckets  # noqa: E402
from wirespeed.spec.replay import ReplayRecord  # noqa: E402
from wirespeed.spec.strategy import Strategy  # noqa: E402
from wirespeed.spec.workload import GradientTensor, TrainingWorkload  # noqa: E402
from wirespeed.system import free_port  # noqa: E402
from wirespeed.tune.places import LoopbackPlace  # noqa: E402
from wirespeed.tune.replay import (  # noqa: E402
    ReplayOptions,
    first_bucket_bytes,
    fitting_scale,
    options_of,
    run_replay,
    scaled_strategy,
)
from wirespeed.tune.replay_layers import ReplayModule, ReplayOptimizer  # noqa: E402
from wirespeed.tune.replay_worker import ReplayResult, result_path  # noqa: E402
from wirespeed.units import MIB  # noqa: E402

pytestmark = pytest.mark.torch


class Silent:
    def __init__(self):
        self.steps = []

    def phase(self, text, *, total=None):
        pass

    def advance(self, step):
        self.steps.append(step)

    def note(self, text):
        pass


def small(*, num_ranks=2) -> TrainingWorkload:
    shapes = [(8, 4), (8,), (16, 8), ()]
    return TrainingWorkload(
        gradients=tuple(
            GradientTensor(
                name=f"g{index}", num_elements=int(torch.Size(shape or (5,)).numel()), ready_s=0.02 * (index + 1), shape=shape
            )
            for index, shape in enumerate(shapes)
        ),
        forward_s=0.03, backward_s=0.1, optimizer_s=0.01, num_ranks=num_ranks,
    )  # fmt: skip


def test_gradients_come_in_order_at_their_times_and_late_work_does_not_push_them_back():
    module = ReplayModule(small(), seed=3)
    seen = []
    parameters = [layer.parameter for layer in reversed(list(module.layers))]

    def note(index):
        seen.append((index, time.perf_counter()))
        time.sleep(0.01)

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: note(index))
    loss = module(torch.zeros(()))
    began_s = time.perf_counter()
    loss.backward()
    ended_s = time.perf_counter()
    assert [index for index, _ in seen] == [0, 1, 2, 3]
    # The hooks take 10 ms each, and the deadlines hold all the same. A busy machine may be late, but never early.
    for index, at in seen:
        assert at - began_s >= 0.02 * (index + 1) - 1e-3
    assert ended_s - began_s >= 0.1 - 1e-3
    assert [tuple(p.grad.shape) for p in parameters] == [(8, 4), (8,), (16, 8), (5,)]
    assert all(p.grad.is_contiguous() and p.grad.abs().sum() > 0 for p in parameters)


def test_a_second_pass_counts_its_own_time():
    module = ReplayModule(small())
    optimizer = ReplayOptimizer(module.parameters(), step_s=0.01)
    for _ in range(2):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        module(torch.zeros(())).backward()
        optimizer.step()
        assert time.perf_counter() - began_s >= 0.14 - 3e-3


def test_parameters_take_no_memory_whatever_their_size():
    module = ReplayModule(replay_workload(load_model("bert-large"), num_ranks=2, scale=1000))
    assert sum(p.untyped_storage().nbytes() for p in module.parameters()) == 4 * len(list(module.parameters()))


def test_a_replay_compares_every_strategy_in_the_buckets_of_full_size(tmp_path):
    model = load_model("resnet50")
    options = options_of(
        model,
        [Strategy(), Strategy.parse("int8/4MiB"), Strategy.parse("topk@1%")],
        num_ranks=2,
        scale=50.0,
        compute_s=0.15,
        num_steps=3,
        rounds=1,
        predicts=False,
    )
    progress = Silent()
    record = run_replay(options, LoopbackPlace(2, why="a test"), tmp_path, progress)
    assert [arm.name for arm in record.arms] == ["dense", "int8/4MiB", "topk@1%"]
    assert progress.steps == sorted(progress.steps)
    assert 0 < progress.steps[-1] <= 4 * (3 + 3)  # polled a few times a second
    assert record.num_parameters == pytest.approx(25_557_032, rel=0.001)
    results = [msgspec.json.decode(result_path(tmp_path, rank).read_bytes(), type=ReplayResult) for rank in range(2)]
    dense = record.arms[0]
    # 4 bytes of every gradient: 2 ranks send 2 * 1/2 of the buffer.
    assert dense.stated_bytes_per_step == pytest.approx(4 * 25_557_032, rel=0.001)
    for arm in record.arms:
        assert len(arm.step_times_s) == 3
        assert arm.step_s >= 0.15 - 2e-3
        assert arm.exposed_s == pytest.approx(max(0.0, arm.step_s - record.measured_compute_s))
        # What DDP really formed are the buckets that the plan fills: the session notes when each is ready.
        strategy = scaled_strategy(arm.strategy, 50.0)
        planned = fill_buckets(
            options.workload.gradients,
            strategy.bucket_bytes,
            first_bucket_bytes=min(first_bucket_bytes(50.0), strategy.bucket_bytes),
        )
        (block,) = [b for b in results[0].blocks if b.name == arm.name]
        # Dense is DDP's own business: of its buckets only the last is noted.
        noted = planned[-1:] if arm.name == "dense" else planned
        for step in block.steps:
            assert len(step.bucket_ready_s) == len(noted)
            # Never before the gradient that fills it; backward counts from the end of forward.
            for at, bucket in zip(step.bucket_ready_s, noted, strict=True):
                assert at >= bucket.ready_s - 2e-3
    assert from_json(to_json(record), ReplayRecord) == record


def test_strategies_keep_their_number_of_buckets_at_any_scale():
    assert scaled_strategy(Strategy.parse("int8/4MiB"), 8).bucket_bytes == MIB // 2
    assert scaled_strategy(Strategy(), 1e5).bucket_bytes == 1024  # the smallest that a strategy may have
    assert first_bucket_bytes(8) == MIB // 8


def test_the_scale_follows_the_rate_the_hosts_and_the_memory():
    assert fitting_scale(100e6, 2, 25_000_000) == 1
    assert fitting_scale(10e9, 2, 25_000_000) == 10
    assert fitting_scale(1e9, 16, 25_000_000) == 4  # 4 Gbit/s in all
    # 6.2 GB of gradients for each of 4 ranks, 512 MiB for all.
    assert fitting_scale(100e6, 4, 1_557_611_200) == 50
    with pytest.raises(UsageError, match="a scale of 1000"):
        fitting_scale(400e9, 64, 10**12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategies": ()}, "no strategy"),
        ({"num_warmup": 1}, "1, 1 and 2 or more"),
    ],
)
def test_a_replay_that_cannot_be_is_refused_before_anything_starts(tmp_path, change, message):
    held = {
        "title": "t", "source": "s", "workload": small(), "strategies": (Strategy(),), "predicts": False, **change
    }  # fmt: skip
    with pytest.raises(UsageError, match=message):
        run_replay(ReplayOptions(**held), LoopbackPlace(2, why="a test"), tmp_path, Silent())


@pytest.mark.slow
def test_under_torchrun_the_ranks_and_the_network_are_the_launchers(tmp_path):
    out = tmp_path / "record.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        "--no-python", sys.executable, "-m", "wirespeed", "bench", "replay", "-m", "resnet50", "--scale", "100",
        "--compute", "100ms", "-s", "half", "--steps", "3", "--rounds", "1", "--no-predict", "-o", str(out), "--json",
    ]  # fmt: skip
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    record = from_json(done.stdout.encode(), ReplayRecord)  # one document, from rank 0 alone
    assert [arm.name for arm in record.arms] == ["dense", "half"]
    assert (record.num_ranks, record.declared_bit_per_s) == (2, None)
    assert out.is_file()
