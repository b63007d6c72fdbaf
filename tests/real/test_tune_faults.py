"""Scripts that fail in every way: the right error, within its deadline, and nothing left behind."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest
from tune_scripts import Quiet, assert_nothing_left, plain, shaped, wait_for, write_script

from wirespeed.cli.main import main
from wirespeed.errors import MissingCapability, PeerFailure, UsageError, WorkloadFailure
from wirespeed.plan.workloads import write_workload
from wirespeed.spec.workload import GradientTensor, TrainingWorkload
from wirespeed.train.trace import RunTrace
from wirespeed.tune.children import _to_blame
from wirespeed.tune.loop import TuneOptions, Tuning
from wirespeed.tune.places import LoopbackPlace
from wirespeed.tune.verdict import raise_unless_fine
from wirespeed.tune.watch import RunEnd, Tails, Watch


def probe(tmp_path, text, *, num_ranks=2, **options):
    """Run the first phase of a tuning over loopback."""
    script = write_script(tmp_path, text)
    options = TuneOptions(script=str(script), out=tmp_path / "out", **options)
    tuning = Tuning(options=options, place=LoopbackPlace(num_ranks, why="a test"), progress=Quiet())
    tuning.check(options)
    tuning.probe()
    return tuning


FAULTS = {
    "raises": (
        plain("if step == 3 and rank == 1: raise ValueError('bad batch')"),
        "rank 1 with exit code 1: ValueError: bad batch",
    ),
    "exits": (plain("if step == 3: sys.exit(7)"), "with exit code 7"),
    "ends early on one rank": (
        plain("if step == 3 and rank == 1: os._exit(0)"),
        "ended on rank 1 with exit code 0 before",
    ),
    "ends early on every rank": (plain("if step == 3: os._exit(0)"), "before its run was over"),
    "has no ddp": (
        shaped("for step in range(20): loss_of(net, step).backward()"),
        "made no DistributedDataParallel model",
    ),
    "never trains": (
        shaped("ddp = DDP(net)\nfor step in range(5): loss_of(ddp, step)"),
        "ended without a training step",
    ),
    "never calls backward": (
        shaped(
            """
            ddp = DDP(net)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(20):
                loss_of(ddp, step)
                optimizer.step()
            """
        ),
        "the probe saw no gradients",
    ),
    "starts ranks itself": (
        "import torch.multiprocessing as mp\ndef work(rank): pass\nif __name__ == '__main__': mp.spawn(work, nprocs=2)",
        "starts ranks of its own",
    ),
    "has a hook of its own": (
        shaped("ddp = DDP(net)\nddp.register_comm_hook(None, lambda state, bucket: None)"),
        "communication hook of its own",
    ),
    "crashes": (plain("if step == 3 and rank == 0: os.kill(os.getpid(), signal.SIGSEGV)"), "with exit code 139"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_script_that_fails_is_named_as_the_cause(kind, tmp_path):
    text, message = FAULTS[kind]
    with pytest.raises(WorkloadFailure) as failure:
        probe(tmp_path, text, num_ranks=2 if "rank == 1" in text else 1)
    assert message in str(failure.value)
    assert "train.py" in str(failure.value) or kind == "never calls backward"
    assert failure.value.exit_code == 1
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def train(:\n", "not a Python script"),
        ("x = 1\0", "not a Python script"),
    ],
)
def test_what_is_not_python_is_refused_before_anything_starts(text, message, tmp_path):
    with pytest.raises(WorkloadFailure, match=message):
        probe(tmp_path, text)
    assert not (tmp_path / "out").exists()


def test_a_rank_that_hangs_between_steps_is_given_up_and_its_stack_is_in_the_log(tmp_path):
    text = plain("while step == 5 and rank == 1: time.sleep(0.1)  # stuck here")
    began_s = time.monotonic()
    with pytest.raises(WorkloadFailure, match="no progress for 4 s after step") as failure:
        probe(tmp_path, text, stall_timeout_s=4.0)
    assert failure.value.exit_code == 1
    # The start of two ranks, the 4 s, and at most 2 x 3 s of grace; gloo would wait for half an hour.
    assert time.monotonic() - began_s < 120
    log = (tmp_path / "out" / "compute" / "log.txt").read_text()
    line = text[: text.index("while")].count("\n") + 1
    assert f'train.py", line {line} in <module>' in log
    assert_nothing_left(tmp_path)


def test_a_script_that_hangs_before_its_first_step_is_given_up(tmp_path):
    began_s = time.monotonic()
    with pytest.raises(WorkloadFailure, match="no DistributedDataParallel model within 3 s"):
        probe(tmp_path, "import time\nwhile True: time.sleep(0.1)", num_ranks=1, start_timeout_s=3.0)
    assert time.monotonic() - began_s < 60  # it would run for ever
    assert_nothing_left(tmp_path)


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    text = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(0.1)"
    with pytest.raises(WorkloadFailure, match="no DistributedDataParallel model"):
        probe(tmp_path, text, num_ranks=1, start_timeout_s=8.0)
    assert_nothing_left(tmp_path)


def test_a_rank_that_is_killed_from_outside_is_a_peer_failure(tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()

    def kill():
        wait_for(lambda: list(pids.iterdir()), "rank 1 has said who it is", 60)
        os.kill(int(next(pids.iterdir()).name), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    text = plain(
        f"if step == 2 and rank == 1: open({str(pids)!r} + '/' + str(os.getpid()), 'w').close(); time.sleep(60)"
    )
    with pytest.raises(PeerFailure, match=r"rank 1 was killed from outside \(SIGKILL\)") as failure:
        probe(tmp_path, text)
    killer.join()
    assert failure.value.exit_code == 4
    assert_nothing_left(tmp_path)


def test_loader_workers_of_a_rank_that_dies_are_ended_too(tmp_path):
    text = shaped(
        """
        from torch.utils.data import DataLoader, TensorDataset
        loader = iter(DataLoader(TensorDataset(torch.zeros(64, 64)), num_workers=1, persistent_workers=True))
        next(loader)
        os._exit(5)
        """
    )
    with pytest.raises(WorkloadFailure, match="with exit code 5"):
        probe(tmp_path, text, num_ranks=1)
    assert_nothing_left(tmp_path)


def test_exit_codes_count_as_the_shell_sees_them(tmp_path):
    # sys.exit(256) is exit code 0 to whoever waits: the script said that all is well, after too few steps.
    tuning = probe(tmp_path, plain("if step == 9: sys.exit(256)"), num_ranks=1)
    assert tuning.workload is not None


def test_a_log_on_a_full_disk_ends_the_run_with_its_reason(tmp_path):
    script = write_script(tmp_path, "print('a line')")
    (tmp_path / "out" / "compute").mkdir(parents=True)
    (tmp_path / "out" / "compute" / "log.txt").symlink_to("/dev/full")
    options = TuneOptions(script=str(script), out=tmp_path / "out")
    tuning = Tuning(options=options, place=LoopbackPlace(1, why="a test"), progress=Quiet())
    with pytest.raises(MissingCapability, match="No space left on device"):
        tuning.probe()
    assert_nothing_left(tmp_path)


# ---------------------------------------------------------------- what is refused before anything starts


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run the command line in a folder; check its exit code, its message, and that stdout stays empty."""

    def check(arguments, code, message):
        monkeypatch.chdir(tmp_path)
        returned = main(arguments)
        told = capsys.readouterr()
        assert returned == code, told.err
        assert message in " ".join(told.err.replace("│", " ").split())
        assert "Traceback" not in told.err
        assert told.out == ""

    return check


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent.py", "--lab", "2x1gbit"], 2, "no script at 'absent.py'"),
        (["train.py"], 2, "got neither --lab nor a launcher's variables"),
        (["train.py", "--lab", "0x1gbit"], 2, "got 0 hosts"),
        (["train.py", "--lab", "1x1gbit"], 2, "one host"),
        (["train.py", "--lab", "2x1potato"], 2, "1potato"),
        (["train.py", "--lab", "2x1kbit"], 2, "64 kbit/s to 34 Gbit/s"),
        (["train.py", "--lab", "two"], 2, "HOSTSxRATE"),
        (["train.py", "--lab", "2x1gbit", "--budget", "0s"], 2, "got --budget '0s'"),
        (["train.py", "--lab", "2x1gbit", "--budget", "-5s"], 2, "-5s"),
        (["train.py", "--lab", "2x1gbit", "--budget", "soon"], 2, "soon"),
        (["train.py", "--lab", "2x1gbit", "--budget", "nan"], 2, "nan"),
        (["train.py", "--lab", "2x1gbit", "--steps", "2"], 2, "--steps"),
        (["train.py", "--lab", "2x1gbit", "--seed", "-1"], 2, "--seed"),
        (["train.py", "--lab", "2x1gbit", "--strategies", "int9"], 2, "int9"),
        (["train.py", "--lab", "2x1gbit", "--strategies", ","], 2, "at least one"),
        (["train.py", "--lab", "2x1gbit", "--fidelity", "best"], 2, "exact, half, compressed, lossy"),
        (["train.py", "--lab", "2x1gbit", "--out", "train.py"], 2, "not a folder"),
        (["train.py", "--lab", "2x1gbit", "--out", "/proc/nowhere"], 3, "cannot write /proc/nowhere"),
        (["broken.py", "--lab", "2x1gbit"], 1, "broken.py is not a Python script"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_at_once(arguments, code, message, tmp_path, refused):
    write_script(tmp_path, "raise SystemExit('never started')")
    write_script(tmp_path, "def f(:", name="broken.py")
    refused(["tune", *arguments], code, message)


def test_one_rank_of_a_launcher_has_nothing_to_tune(tmp_path, refused, monkeypatch):
    write_script(tmp_path, "raise SystemExit('never started')")
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    refused(["tune", "train.py"], 2, "got a job of one rank")


# ---------------------------------------------------------------- files of others


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a wirespeed record"),
        (b"{", "not a wirespeed record"),
        (b"\xff\xfe", "not a wirespeed record"),
        (b"[" * 5000, "not a wirespeed record"),
        (b'{"kind": "links", "schema": 1}', "kind 'links'"),
        (b'{"kind": "tune", "schema": 99}', "written by a newer wirespeed"),
        (b'{"kind": "tune", "schema": 1}', "damaged"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(content, message, tmp_path, refused):
    (tmp_path / "tune.json").write_bytes(content)
    refused(["report", "tune.json", "-o", "page.html"], 2, message)
    assert sorted(os.listdir(tmp_path)) == ["tune.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "fabric.toml"),
        (b"= 1", "fabric.toml"),
        (b"\xff", "fabric.toml"),
        (b"schema = 99\n", "schema 99"),
        (b'schema = "one"\n', "fabric.toml"),
    ],
)
def test_a_fabric_that_cannot_be_read_is_named(content, message, tmp_path, refused):
    (tmp_path / "fabric.toml").write_bytes(content)
    gradients = (GradientTensor(name="w", num_elements=1000, ready_s=0.1),)
    workload = TrainingWorkload(gradients=gradients, forward_s=0.1, backward_s=0.1, optimizer_s=0.1, num_ranks=2)
    write_workload(tmp_path / "work.json", workload)
    refused(["plan", "train", "-w", "work.json", "-f", "fabric.toml"], 2, message)


# ---------------------------------------------------------------- the watch


def heartbeat(path, step):
    path.write_bytes(struct.pack("<q", step))


def test_the_watch_tells_no_model_from_no_step_from_no_progress(tmp_path):
    watch = Watch(lambda rank: tmp_path / f"step-{rank}", 3, start_timeout_s=0.0, stall_timeout_s=0.0)
    watch.check()
    assert watch.check() == "no DistributedDataParallel model within 0 s (ranks 0, 1, 2)"
    heartbeat(tmp_path / "step-0", 0)
    heartbeat(tmp_path / "step-1", 1)
    (tmp_path / "step-2").touch()
    assert watch.check() == "no optimizer step within 0 s (ranks 0, 2)"
    for rank, step in enumerate((5, 4, 6)):
        heartbeat(tmp_path / f"step-{rank}", step)
    assert watch.check() is None
    assert watch.check() == "no progress for 0 s after step 4 (rank 1 behind)"


@pytest.mark.parametrize(
    ("codes", "blamed"),
    [
        ([None, 0], None),
        ([1, None], 0),
        ([1, -signal.SIGKILL], 1),  # killed: the other lost its connection, and was seen to end at the same look
        ([1, -signal.SIGSEGV], 1),
        ([-signal.SIGABRT, 1], 0),
    ],
)
def test_of_ranks_that_end_together_the_killed_one_is_to_blame(codes, blamed):
    assert _to_blame(codes) == blamed


def test_a_rank_that_lost_another_is_not_blamed_for_it(tmp_path):
    traces = [
        RunTrace(status="short", rank=0, error="RuntimeError: [transport] Connection closed by peer [127.0.0.1]:40000"),
        RunTrace(status="short", rank=1, error="ValueError: bad batch"),
    ]
    end = RunEnd(returncode=1, failed_rank=0)
    with pytest.raises(WorkloadFailure, match="failed on rank 1 with exit code 1: ValueError: bad batch"):
        raise_unless_fine(end, traces, 2, "train.py", tmp_path / "log.txt")
    with pytest.raises(WorkloadFailure, match=r"on rank 0 .*closed by peer.*another rank ended first"):
        raise_unless_fine(end, traces[:1], 2, "train.py", tmp_path / "log.txt")


def test_children_die_with_the_program_that_started_them(tmp_path):
    script = write_script(tmp_path, "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.1)")
    code = f"""
import sys
from pathlib import Path
from wirespeed.tune.places import LoopbackPlace
LoopbackPlace(2, why="a test").run([sys.executable, {str(script)!r}], env={{}}, folder=Path({str(tmp_path)!r}), watch=None, timeout_s=60)
"""
    owner = subprocess.Popen([sys.executable, "-c", code])
    wait_for(
        lambda: (tmp_path / "log.txt").exists() and (tmp_path / "log.txt").read_text().count("up") == 2,
        "both ranks are up",
        60,
    )
    owner.kill()
    owner.wait()
    assert_nothing_left(tmp_path)


def test_two_tunings_never_share_a_folder(tmp_path):
    script = write_script(tmp_path, "raise SystemExit(3)")
    options = TuneOptions(script=str(script), out=tmp_path / "out")
    first, second = (Tuning(options=options, place=LoopbackPlace(1, why="a test"), progress=Quiet()) for _ in range(2))
    with pytest.raises(WorkloadFailure, match="with exit code 3"):
        first.run()
    with pytest.raises(UsageError, match="another tuning is writing"):
        second.run()
    os.close(first._out_handle)
    os.close(second._out_handle)


def test_a_script_that_prints_without_end_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("wirespeed.tune.watch.MAX_LOG_BYTES", 10_000)
    tails = Tails(tmp_path / "log.txt", range(1))
    for number in range(1000):
        tails.add(0, "stdout", f"{number:0100d}")
    assert tails.close()[0][-1].endswith("999"), "the last words are known all the same"
    # 100 lines of 100 bytes reach the limit, and the one after them passes it.
    assert (tmp_path / "log.txt").read_text().splitlines()[101:] == [
        "[0] wirespeed: the log ends here, after 10000 bytes"
    ]
