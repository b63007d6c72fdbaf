"""Schedules on real ranks: what is exchanged when, that it is exact where it can be, and that it resumes bit by bit."""

import pytest
from ranks import fine, run_program

LOOP = """
import hashlib
mse = torch.nn.functional.mse_loss

def start(strategy, model=None, lr=0.05, momentum=0.0, **options):
    model = make_model() if model is None else model
    ddp = DDP(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=momentum)
    return model, ddp, optimizer, wirespeed.train.attach(ddp, optimizer, strategy=strategy)

def take(ddp, optimizer, numbers):
    for step in numbers:
        x, y = batch(step)
        optimizer.zero_grad()
        mse(ddp(x), y).backward()
        optimizer.step()

def hashed(model):
    every = [None] * num_ranks
    dist.all_gather_object(every, hashlib.sha256(flat(model).numpy().tobytes()).hexdigest())
    return len(set(every)) == 1

def distance(one, other, begin):
    return float((one - other).norm() / (one - begin).norm())

def rounding(one, other):
    return float((one - other).norm() / one.norm())

begin = flat(make_model())
"""
ROUNDING = 1e-6
"""Relative to the parameters: some ten steps of fp32 (2^-24), each of a few operations."""


def test_local_sgd_of_period_1_equals_dense_to_rounding(tmp_path):
    results = fine(
        LOOP
        + """
distances = []
for momentum in (0.0, 0.9):
    found = []
    for name in ["dense", "dense/local_sgd@1", "dense/local_sgd@1+3"]:
        model, ddp, optimizer, session = start(name, momentum=momentum)
        take(ddp, optimizer, range(8))
        found.append(flat(model))
    distances += [rounding(found[0], other) for other in found[1:]]
report(distances=distances)
""",
        tmp_path,
    )
    # Both average the same numbers, once before and once after they are scaled and added.
    assert all(len(r["distances"]) == 4 and max(r["distances"]) < ROUNDING for r in results)


@pytest.mark.slow
def test_ranks_are_equal_after_an_exchange_and_only_then(tmp_path):
    names = ["dense/local_sgd@3", "int8/64KiB/local_sgd@3", "topk@5%/local_sgd@3", "half/local_sgd@3"]
    names += ["sign/local_sgd@3", "dense/diloco@3", "int8/diloco@3", "int4/diloco@3"]
    results = fine(
        LOOP
        + f"""
told = {{}}
for name in {names!r}:
    model, ddp, optimizer, session = start(name, momentum=0.9)
    equal, apart = [], []
    for step in range(7):
        take(ddp, optimizer, [step])
        equal.append(hashed(model))
        apart.append(session.num_steps_apart)
    session.synchronize()
    equal.append(hashed(model))
    told[name] = dict(equal=equal, apart=apart, finite=bool(torch.isfinite(flat(model)).all()))
report(told=told)
""",
        tmp_path,
        num_ranks=3,
    )
    for result in results:
        assert list(result["told"]) == names
        for name, told in result["told"].items():
            assert told["equal"] == [False, False, True, False, False, True, False, True], name
            assert told["apart"] == [1, 2, 0, 1, 2, 0, 1], name
            assert told["finite"], name


def test_warm_up_exchanges_gradients_at_every_step(tmp_path):
    results = fine(
        LOOP
        + """
model, ddp, optimizer, session = start("int8/local_sgd@3+2")
equal = []
for step in range(8):
    take(ddp, optimizer, [step])
    equal.append(hashed(model))
report(equal=equal)
""",
        tmp_path,
    )
    assert all(r["equal"] == [True, True, False, False, True, False, False, True] for r in results)


def test_diloco_is_its_outer_optimizer_on_the_mean_move(tmp_path):
    results = fine(
        LOOP
        + """
model, ddp, optimizer, session = start("dense/diloco@3", momentum=0.9)
take(ddp, optimizer, range(9))

own = make_model()
inner = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
outer_parameters = [torch.nn.Parameter(p.detach().clone()) for p in own.parameters()]
outer = torch.optim.SGD(outer_parameters, lr=0.7, momentum=0.9, nesterov=True)
for step in range(9):
    take(own, inner, [step])
    if step % 3 == 2:
        for base, parameter in zip(outer_parameters, own.parameters()):
            base.grad = (base - parameter).detach()
            dist.all_reduce(base.grad)
            base.grad /= num_ranks
        outer.step()
        with torch.no_grad():
            for base, parameter in zip(outer_parameters, own.parameters()):
                parameter.copy_(base)
report(distance=rounding(flat(own), flat(model)))
""",
        tmp_path,
    )
    assert all(r["distance"] < ROUNDING for r in results)


def test_delayed_applies_the_gradients_of_the_step_before(tmp_path):
    results = fine(
        LOOP
        + """
def by_hand(steps):
    own = make_model()
    inner = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
    late = [torch.zeros_like(p) for p in own.parameters()]
    for step in range(steps):
        x, y = batch(step)
        inner.zero_grad()
        mse(own(x), y).backward()
        for i, parameter in enumerate(own.parameters()):
            now = parameter.grad / num_ranks
            dist.all_reduce(now)
            parameter.grad = late[i]
            late[i] = now
        inner.step()
    return flat(own)

expected = by_hand(8)
told = {}
for name in ["dense/delayed", "half/delayed", "int8/64KiB/delayed"]:
    model, ddp, optimizer, session = start(name, momentum=0.9)
    take(ddp, optimizer, range(1))
    first = torch.equal(flat(model), begin)  # zeros are all that the first step is given
    take(ddp, optimizer, range(1, 8))
    told[name] = dict(first=first, distance=distance(expected, flat(model), begin), agree=agree(model),
                      rounding=rounding(expected, flat(model)))
    session.detach()
report(told=told)
""",
        tmp_path,
        num_ranks=3,
    )
    for result in results:
        assert all(told["first"] and told["agree"] for told in result["told"].values())
        assert result["told"]["dense/delayed"]["rounding"] < ROUNDING
        assert result["told"]["half/delayed"]["distance"] < 2e-3
        assert result["told"]["int8/64KiB/delayed"]["distance"] < 5e-2


@pytest.mark.slow
def test_a_checkpoint_within_a_period_resumes_bit_by_bit(tmp_path):
    names = [
        "dense/local_sgd@4",
        "int8/local_sgd@4+2",
        "half/local_sgd@4",
        "int8/diloco@4",
        "dense/delayed",
        "int8/delayed",
    ]
    results = fine(
        LOOP
        + f"""
warnings.simplefilter("ignore")  # detached within a period
equal = {{}}
for name in {names!r}:
    def fresh():
        # Buckets that never change: int8 blocks then begin at the same elements before and after.
        return start(name, find_unused_parameters=True)

    model, ddp, optimizer, session = fresh()
    take(ddp, optimizer, range(8))
    held = {{k: v.clone() for k, v in model.state_dict().items()}}
    torch.save(session.state_dict(), Path(sys.argv[1], f"state-{{rank}}.pt"))
    take(ddp, optimizer, range(8, 15))
    straight = flat(model)
    session.detach()
    model, ddp, optimizer, session = fresh()
    model.load_state_dict(held)
    session.load_state_dict(torch.load(Path(sys.argv[1], f"state-{{rank}}.pt"), weights_only=True))
    take(ddp, optimizer, range(8, 15))
    equal[name] = torch.equal(straight, flat(model))
    session.detach()
report(equal=equal)
""",
        tmp_path,
    )
    assert all(r["equal"] == dict.fromkeys(names, True) for r in results)


def test_stated_bytes_are_those_of_an_exchange_over_the_period(tmp_path):
    results = fine(
        LOOP
        + """
stated = {}
for name in ["dense/local_sgd@4", "int8/diloco@4", "dense/delayed"]:
    model, ddp, optimizer, session = start(name)
    take(ddp, optimizer, range(13))
    told = session.report()
    stated[name] = (told.stated_bytes_per_step, told.steps_per_exchange, told.wire_bytes_per_step)
    session.detach() if session.num_steps_apart == 0 else session.synchronize()
    text = str(told)
num_elements = sum(p.numel() for p in model.parameters())
report(stated=stated, num_elements=num_elements,
       once={name: Strategy.parse(name).wire_bytes(num_elements, num_ranks) for name in ("dense", "int8")})
""",
        tmp_path,
    )
    # 13 steps, of which the first is not counted: three whole periods of 4.
    told, once = results[0]["stated"], results[0]["once"]
    assert told["dense/local_sgd@4"][:2] == [once["dense"] / 4, 4]
    assert told["int8/diloco@4"][:2] == [once["int8"] / 4, 4]
    assert told["dense/delayed"][:2] == [once["dense"], 1]


def test_running_means_are_averaged_and_constants_stay(tmp_path):
    results = fine(
        LOOP
        + """
class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 8)
        self.register_buffer("table", torch.full((3,), 1 / 3), persistent=False)

    def forward(self, x):
        return self.b(self.norm(self.a(x))) * self.table.sum()

model, ddp, optimizer, session = start("dense/local_sgd@2", Normed())
take(ddp, optimizer, [0])
def same(t):
    every = [torch.empty_like(t) for _ in range(num_ranks)]
    dist.all_gather(every, t)
    return all(torch.equal(t, other) for other in every)
before = same(model.norm.running_mean)
off = ddp.broadcast_buffers
take(ddp, optimizer, [1])
after = same(model.norm.running_mean)
session.switch(Strategy())
report(before=before, after=after, off=off, on=ddp.broadcast_buffers, table=model.table.tolist())
""",
        tmp_path,
        num_ranks=3,
    )
    third = 0.3333333432674408  # 1/3 in fp32
    assert all(r == {"before": False, "after": True, "off": False, "on": True, "table": [third] * 3} for r in results)


def test_switching_within_a_period_brings_ranks_together_first(tmp_path):
    results = fine(
        LOOP
        + """
model, ddp, optimizer, session = start("int8/local_sgd@4", momentum=0.9)
equal = []
for step, name in enumerate(["int8/diloco@4", "dense/delayed", "topk@5%", "dense/local_sgd@2", "int8"]):
    take(ddp, optimizer, range(3 * step, 3 * step + 3))
    session.switch(Strategy.parse(name))
    equal.append(hashed(model))
take(ddp, optimizer, range(20, 23))
equal.append(hashed(model))
report(equal=equal)
""",
        tmp_path,
    )
    assert all(r["equal"] == [True] * 6 for r in results)


def test_an_overflow_on_one_rank_at_the_end_of_a_period_skips_all(tmp_path):
    results = fine(
        LOOP
        + """
model, ddp, optimizer, session = start("int8/local_sgd@3")
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
scales, apart = [], []
for step in range(6):
    x, y = batch(step)
    if (step, rank) in ((1, 0), (2, 1)):  # within a period on one rank, then at its end on another
        x[0, 0] = float("inf")
    optimizer.zero_grad()
    scaler.scale(mse(ddp(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
    apart.append(session.num_steps_apart)
report(scales=scales, apart=apart, equal=hashed(model), finite=bool(torch.isfinite(flat(model)).all()))
""",
        tmp_path,
    )
    first, second = results
    assert first["scales"] == [64, 32, 16, 16, 16, 16]  # rank 0 skipped its own step 1, and step 2 with the other
    assert second["scales"] == [64, 64, 32, 32, 32, 32]
    # Nobody stepped at the end of the first period: its exchange was made before the next forward.
    assert first["apart"] == second["apart"] == [1, 2, 3, 1, 2, 0]
    assert first["equal"]
    assert first["finite"]


@pytest.mark.parametrize("strategy", ["dense/local_sgd@4", "int8/diloco@4", "dense/delayed", "int8/delayed"])
def test_a_rank_that_dies_fails_the_others_with_a_peer_failure(strategy, tmp_path):
    end, _ = run_program(
        LOOP
        + f"""
model, ddp, optimizer, session = start({strategy!r})
try:
    for step in range(50):
        if step == 6 and rank == 1:
            os._exit(0)
        take(ddp, optimizer, [step])
except Exception as fault:
    print(f"{{type(fault).__name__}}: {{fault}}", flush=True)
    os._exit(4)
""",
        tmp_path,
        num_ranks=2,
        timeout_s=150,
    )
    assert end.returncode == 4, end
    assert any("PeerFailure" in line and "rank died" in line for line in end.tail[0]), end.tail


def test_what_cannot_keep_a_schedule_is_refused_or_warned_of(tmp_path):
    results = fine(
        LOOP
        + """
said = []
def attempt(act):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            act()
            said.append([str(w.message) for w in seen if "wirespeed" in str(w.message)])
        except wirespeed.UsageError as fault:
            said.append([str(fault)])

def several_optimizers():
    model = make_model()
    ddp = DDP(model)
    parameters = list(ddp.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.05) for part in (parameters[:2], parameters[2:])]
    session = wirespeed.train.attach(ddp, strategy="local_sgd@4")
    x, y = batch(0)
    for _ in range(2):
        mse(ddp(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

def delayed_with_scaler():
    model, ddp, optimizer, session = start("delayed")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = batch(0)
    scaler.scale(mse(ddp(x), y)).backward()
    scaler.step(optimizer)

def accumulated_without_no_sync():
    model, ddp, optimizer, session = start("delayed")
    x, y = batch(0)
    for _ in range(3):
        mse(ddp(x), y).backward()
    optimizer.step()
    session.detach()

def detached_apart():
    model, ddp, optimizer, session = start("local_sgd@4")
    take(ddp, optimizer, range(2))
    session.detach()

for act in (several_optimizers, delayed_with_scaler, accumulated_without_no_sync, detached_apart):
    attempt(act)
report(said=said)
""",
        tmp_path,
    )
    for result in results:
        several, scaler, accumulated, detached = result["said"]
        assert "attach(ddp, optimizer)" in several[0]
        assert "GradScaler" in scaler[0]
        assert len(accumulated) == 1
        assert "no_sync" in accumulated[0]
        assert len(detached) == 1
        assert "session.synchronize()" in detached[0]


def test_ranks_that_drift_apart_are_told_of_by_hash(tmp_path):
    results = fine(
        LOOP
        + """
model, ddp, optimizer, session = start("int8")
take(ddp, optimizer, range(2))
session.check_agreement()
if rank == 1:
    with torch.no_grad():
        model[0].bias[3] += 1e-3
try:
    take(ddp, optimizer, [2])
    report(error=None)
except wirespeed.DataError as fault:
    report(error=str(fault))
""",
        tmp_path,
        num_ranks=3,
        env={"WIRESPEED_CHECK": "1"},
    )
    assert all("parameters differ between ranks: 1 from rank 0" in r["error"] for r in results)
