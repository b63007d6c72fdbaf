"""async on real ranks: nobody waits for a slow one that is not too slow, and in the end all hold the same."""

import pytest
from ranks import fine, run_program
from test_schedules import LOOP, ROUNDING

TIMED = (
    LOOP
    + """
import time

def train(strategy, steps, compute_s, each=lambda step: None):
    model, ddp, optimizer, session = start(strategy)
    took = []
    for step in range(steps):
        began = time.perf_counter()
        x, y = batch(step)
        optimizer.zero_grad()
        loss = mse(ddp(x), y)
        time.sleep(compute_s)  # a device that computes
        loss.backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
        each(step)
    ended = time.monotonic()
    apart = session.num_steps_apart
    session.synchronize()
    return dict(took=sum(took[3:]), ended=ended, synced=time.monotonic(), apart=apart, after=session.num_steps_apart,
                equal=hashed(model), finite=bool(torch.isfinite(flat(model)).all())), model, session
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dense/async", "int8/async"])
def test_a_rank_three_times_slower_holds_up_nobody_and_all_agree_in_the_end(strategy, tmp_path):
    results = fine(
        TIMED
        + f"""
alone, _, session = train({strategy!r}, 40, 0.02)
session.detach()
beside, _, session = train({strategy!r}, 40, 0.06 if rank == 2 else 0.02)
report(alone=alone, beside=beside)
""",
        tmp_path,
        num_ranks=3,
    )
    for rank, result in enumerate(results):
        for told in (result["alone"], result["beside"]):
            assert told["equal"]
            assert told["finite"]
            assert told["apart"] == 40
            assert told["after"] == 0
        if rank != 2:
            # Synchronous, the others would have 1/3 of their own speed. The bar of 0.9 is benchmarks/quality.py's.
            assert result["alone"]["took"] / result["beside"]["took"] > 0.75
            # They had ended long before the slow one, and synchronize has waited for it.
            assert result["beside"]["ended"] < results[2]["beside"]["ended"] - 1.0
            assert result["beside"]["synced"] > results[2]["beside"]["ended"]


def test_a_rank_beyond_the_staleness_is_waited_for(tmp_path):
    results = fine(
        TIMED
        + """
# Rank 1 pauses for a second within its fourth step; rank 0 has time for some hundred steps in it and may take few.
told, _, session = train("dense/async@3", 24, 0.0, lambda step: time.sleep(1.0) if (step, rank) == (3, 1) else None)
report(**told)
""",
        tmp_path,
    )
    assert all(r["equal"] for r in results)
    assert results[0]["took"] > 0.8


def test_what_all_have_moved_is_averaged_and_nothing_is_lost(tmp_path):
    # With gradients that do not depend on the parameters every order of averaging has the same end.
    results = fine(
        TIMED
        + """
class Fixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(5000))
    def forward(self, x):
        return (self.weight * x).sum()

distances = {}
for name in ["dense/async", "dense/async@1", "half/async", "int8/async"]:
    model = Fixed()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    session = wirespeed.train.attach(ddp, optimizer, strategy=name)
    total = torch.zeros(5000)
    for part in (range(7), range(7, 12)):
        for step in part:
            x = torch.randn(5000, generator=torch.Generator().manual_seed(100 * step + rank))
            total -= x
            optimizer.zero_grad()
            ddp(x).backward()
            optimizer.step()
        session.synchronize()
    expected = total.clone()
    dist.all_reduce(expected)
    expected /= num_ranks
    distances[name] = float((model.weight.detach() - expected).norm() / expected.norm())
    equal = hashed(model)
    session.switch(Strategy())
report(distances=distances, equal=equal)
""",
        tmp_path,
        num_ranks=3,
    )
    for result in results:
        assert result["equal"]
        assert result["distances"]["dense/async"] < ROUNDING
        assert result["distances"]["dense/async@1"] < ROUNDING
        assert result["distances"]["half/async"] < 2e-3
        assert result["distances"]["int8/async"] < 5e-2  # of what is sent last, error feedback keeps the rest


def test_a_state_is_taken_only_where_ranks_agree_and_resumes(tmp_path):
    results = fine(
        LOOP
        + """
model, ddp, optimizer, session = start("dense/async")
take(ddp, optimizer, range(3))
try:
    session.state_dict()
    said = ""
except wirespeed.UsageError as fault:
    said = str(fault)
session.synchronize()
torch.save(session.state_dict(), Path(sys.argv[1], f"state-{rank}.pt"))
held = {k: v.clone() for k, v in model.state_dict().items()}
session.switch(Strategy())
model, ddp, optimizer, session = start("dense/async")
model.load_state_dict(held)
session.load_state_dict(torch.load(Path(sys.argv[1], f"state-{rank}.pt"), weights_only=True))
take(ddp, optimizer, range(3, 6))
session.synchronize()
report(said=said, equal=hashed(model), moved=not torch.equal(flat(model), torch.cat([v.flatten() for v in held.values()])))
""",
        tmp_path,
    )
    assert all("call session.synchronize() on all ranks first" in r["said"] for r in results)
    assert all(r["equal"] and r["moved"] for r in results)


@pytest.mark.parametrize("strategy", ["dense/async", "int8/async"])
def test_a_rank_that_leaves_fails_the_others_with_what_to_do(strategy, tmp_path):
    end, _ = run_program(
        LOOP
        + f"""
model, ddp, optimizer, session = start({strategy!r})
try:
    for step in range(200):
        if step == 6 and rank == 1:
            os._exit(0)
        take(ddp, optimizer, [step])
    session.synchronize()
except Exception as fault:
    print(f"{{type(fault).__name__}}: {{fault}}", flush=True)
    os._exit(4)
""",
        tmp_path,
        timeout_s=60,
    )
    assert end.returncode == 4, end
    assert any("PeerFailure" in line and "a rank died" in line for line in end.tail[0]), end.tail


def test_what_makes_every_rank_wait_is_refused(tmp_path):
    results = fine(
        LOOP
        + """
try:
    start("async", find_unused_parameters=True)
    said = ""
except wirespeed.UsageError as fault:
    said = str(fault)
report(said=said)
""",
        tmp_path,
    )
    assert all("find_unused_parameters=True with schedule 'async'" in r["said"] for r in results)
