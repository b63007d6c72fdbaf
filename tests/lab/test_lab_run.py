"""Running programs in a lab: what ranks see, how their output and ends are reported, what happens when one fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_tools import processes_of, python

from wirespeed.errors import UsageError
from wirespeed.lab import Lab, LabSpec


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(LabSpec(hosts=2, rate_bit_per_s=1e9)) as made:
        yield made


def collect(lab: Lab, command: list[str], **options: object) -> tuple[int, dict[int, list[str]]]:
    lines: dict[int, list[str]] = {}
    result = lab.run(
        command, on_line=lambda rank, _, line: lines.setdefault(rank, []).append(line), timeout_s=100.0, **options
    )
    return result.returncode, lines


def test_each_rank_gets_its_place_its_host_and_its_interface(lab: Lab) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME WIRESPEED_HOST WIRESPEED_LAB"
    code, lines = collect(
        lab, python("import os,sys; print(*(os.environ[n] for n in sys.argv[1].split()))", names), ranks_per_host=2
    )
    assert code == 0
    assert lines == {
        0: [f"0 4 0 2 10.77.0.1 eth0 h0 {lab.name}"],
        1: [f"1 4 1 2 10.77.0.1 eth0 h0 {lab.name}"],
        2: [f"2 4 0 2 10.77.0.1 eth0 h1 {lab.name}"],
        3: [f"3 4 1 2 10.77.0.1 eth0 h1 {lab.name}"],
    }


def test_ranks_take_hosts_in_the_order_that_is_asked_for(lab: Lab) -> None:
    show = python("import os; print(*(os.environ[n] for n in 'RANK WORLD_SIZE MASTER_ADDR WIRESPEED_HOST'.split()))")
    assert collect(lab, show, order=["h1", "h0"])[1] == {0: ["0 2 10.77.0.2 h1"], 1: ["1 2 10.77.0.2 h0"]}
    assert collect(lab, show, order=["h1"])[1] == {0: ["0 1 10.77.0.2 h1"]}
    for order in (["h0", "h7"], ["h0", "h0"], []):
        with pytest.raises(UsageError, match="got the order"):
            lab.run(show, order=order)


def test_names_of_hosts_resolve_and_the_hostname_is_the_hosts(lab: Lab) -> None:
    code, lines = collect(
        lab,
        python("import socket; print(socket.gethostname(), socket.gethostbyname('h1'), socket.gethostbyname('h0'))"),
    )
    assert code == 0
    assert lines == {0: ["h0 10.77.0.2 10.77.0.1"], 1: ["h1 10.77.0.2 10.77.0.1"]}


def test_ranks_run_as_sched_batch_unless_told_otherwise(lab: Lab) -> None:
    show = python("import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)")
    assert collect(lab, show)[1] == {0: ["True"], 1: ["True"]}
    assert collect(lab, show, sched_batch=False)[1] == {0: ["False"], 1: ["False"]}


def test_the_users_environment_argument_outranks_the_labs_own(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "77")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    show = python("import os; print(os.environ['RANK'], os.environ['MASTER_PORT'], os.environ['OMP_NUM_THREADS'])")
    assert collect(lab, show, env={"MASTER_PORT": "123"})[1] == {0: ["0 123 1"], 1: ["1 123 1"]}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert collect(lab, show, env={"MASTER_PORT": "123"})[1] == {0: ["0 123 3"], 1: ["1 123 3"]}


def test_two_ranks_talk_over_the_lab(lab: Lab) -> None:
    code = """
import os, socket
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
if rank == 0:
    connection, peer = socket.create_server(("h0", port)).accept()
    print(connection.recv(5).decode(), "from", peer[0])
else:
    import time
    for _ in range(500):
        try:
            connection = socket.create_connection(("h0", port), timeout=5)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.sendall(b"hello")
"""
    assert collect(lab, python(code)) == (0, {0: ["hello from 10.77.0.2"]})


def test_output_is_prefixed_with_the_rank_on_its_own_stream(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os,sys; print('out\\nhalf', end=''); print('err', file=sys.stderr)"
    result = lab.run(python(program), timeout_s=30.0)
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["[0] half", "[0] out", "[1] half", "[1] out"]
    assert sorted(captured.err.splitlines()) == ["[0] err", "[1] err"]
    assert sorted(result.tails[1]) == ["err", "half", "out"]


def test_the_first_rank_that_fails_stops_the_others_and_gives_the_code(lab: Lab) -> None:
    began = time.monotonic()
    program = "import os,time; os.environ['RANK'] == '1' and os._exit(7); time.sleep(600)"
    result = lab.run(python(program), timeout_s=30.0)
    assert (result.returncode, result.failed_rank, result.timed_out) == (7, 1, False)
    assert result.reason == "rank 1 on h1 ended with exit code 7"
    assert time.monotonic() - began < 30  # it would sleep for 600


def test_a_rank_killed_by_a_signal_gives_128_and_the_signal(lab: Lab) -> None:
    result = lab.run(python("import os,time; os.environ['RANK'] == '0' and os.kill(os.getpid(), 9); time.sleep(600)"))
    assert (result.returncode, result.failed_rank) == (137, 0)
    assert result.reason == "rank 0 on h0 was ended by SIGKILL"


def test_the_deadline_ends_a_run_with_124(lab: Lab) -> None:
    result = lab.run(python("import time; print('up'); time.sleep(600)"), timeout_s=0.5)
    assert (result.returncode, result.timed_out, result.failed_rank) == (124, True, None)
    assert result.reason is not None
    assert "did not finish within 500 ms" in result.reason


def test_a_rank_that_ignores_sigterm_is_killed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wirespeed.lab.run.GRACE_S", 0.2)
    program = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
    assert lab.run(python(program), timeout_s=0.5).timed_out


def test_a_run_ends_what_its_ranks_left_behind_even_in_other_sessions(lab: Lab, state_dir: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    assert collect(lab, python(program))[0] == 0
    assert processes_of(state_dir) == [lab.status().keeper_pid]


def test_a_run_leaves_what_was_started_beside_it(lab: Lab) -> None:
    server = lab.popen("h0", ["sleep", "600"])
    assert collect(lab, ["true"])[0] == 0
    assert server.poll() is None
    server.terminate()
    server.wait()


def test_a_program_that_does_not_exist_gives_127_and_says_so(lab: Lab) -> None:
    result = lab.run(["no-such-program"], on_line=lambda *_: None, timeout_s=30.0)
    assert result.returncode == 127
    assert any("no-such-program" in line for tail in result.tails for line in tail)


def test_exec_collects_output_and_ends_at_its_deadline(lab: Lab) -> None:
    done = lab.exec("h1", python("import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)"))
    assert (done.returncode, done.stdout, done.stderr) == (3, "a\n", "b\n")
    late = lab.exec("h1", ["sh", "-c", "echo begun; sleep 600 & sleep 600"], timeout_s=2.0)
    assert (late.returncode, late.stdout) == (None, "begun\n")


def test_much_output_and_bytes_that_are_no_text_arrive(lab: Lab) -> None:
    program = "import os; os.write(1, b'\\xff\\n' + b'x' * 3000000 + b'\\nend')"
    code, lines = collect(lab, python(program))
    assert code == 0
    assert lines[0][0] == "\ufffd"
    assert sum(map(len, lines[0][1:-1])) == 3000000
    assert lines[0][-1] == "end"


def test_an_interrupt_in_the_program_stops_the_ranks(lab: Lab, state_dir: Path) -> None:
    def interrupt(rank: int, stream: str, line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.run(python("import time; print('up'); time.sleep(600)"), on_line=interrupt)
    assert len(processes_of(state_dir)) == 1, "only the keeper is left"


def test_four_ranks_start_in_under_a_second(lab: Lab) -> None:
    # Measured 0.09 s on an idle machine; ten times that leaves room for a busy one.
    assert any(lab.run(["true"], ranks_per_host=2).duration_s < 1.0 for _ in range(10))


@pytest.mark.parametrize(("host", "command"), [("h2", ["true"]), ("", ["true"]), ("h0", [])])
def test_an_unknown_host_or_no_command_is_a_usage_error(lab: Lab, host: str, command: list[str]) -> None:
    with pytest.raises(UsageError):
        lab.exec(host, command)


def test_a_lab_that_is_not_up_says_so() -> None:
    lab = Lab(LabSpec(hosts=1, rate_bit_per_s=1e9))
    with pytest.raises(UsageError, match="not up"):
        lab.run([sys.executable, "-V"])
    lab.down()


def test_ranks_are_bounded(lab: Lab) -> None:
    for ranks_per_host in (0, -1, 10_000):
        with pytest.raises(UsageError, match="ranks"):
            lab.run(["true"], ranks_per_host=ranks_per_host)
