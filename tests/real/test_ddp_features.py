"""What users of DistributedDataParallel do beside a plain loop, under every codec: it works, or it is refused in words."""

import pytest
from ranks import fine

CODECS = ["half", "int8", "int4", "sign", "topk@5%", "lowrank@4"]

TRAIN = """
mse = torch.nn.functional.mse_loss

def start(strategy, model=None, lr=0.05, **options):
    model = make_model() if model is None else model
    ddp = DDP(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    return model, ddp, optimizer, wirespeed.train.attach(ddp, optimizer, strategy=strategy)

def train(strategy, steps=6, clip=None, micro=1, model=None, **options):
    model, ddp, optimizer, session = start(strategy, model, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro - 1):
            with ddp.no_sync():
                x, y = batch(100 * part + step)
                mse(ddp(x), y).backward()
        x, y = batch(step)
        mse(ddp(x), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()
    session.detach()
    return model

def distance(one, other, start):
    return float((flat(one) - flat(other)).norm() / (flat(one) - flat(start)).norm())
"""


@pytest.mark.slow
def test_bucket_views_accumulation_and_clipping_change_nothing_they_should_not(tmp_path):
    results = fine(
        TRAIN
        + f"""
told = {{}}
for name in {CODECS!r}:
    plain, viewed = train(name), train(name, gradient_as_bucket_view=True)
    accumulated, dense = train(name, micro=3), train("dense", micro=3)
    clipped, clipped_dense = train(name, clip=0.05), train("dense", clip=0.05)
    told[name] = dict(
        views=torch.equal(flat(plain), flat(viewed)),
        agree=[agree(m) for m in (plain, viewed, accumulated, clipped)],
        accumulated=distance(dense, accumulated, make_model()),
        clipped=distance(clipped_dense, clipped, make_model()),
    )
report(told=told)
""",
        tmp_path,
    )
    for name, told in results[0]["told"].items():
        assert told["views"], name
        assert told["agree"] == [True] * 4, name
        if name in ("half", "int8"):  # these stay near dense: 6 steps of 11 and of 8 bits
            assert told["accumulated"] < 2e-2, name
            assert told["clipped"] < 2e-2, name


BRANCHES = """
class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)
        self.dead, self.never = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)
        self.step = 0

    def forward(self, x):
        branch = self.left if (self.step + rank) % 2 else self.right
        self.step += 1
        return branch(x) + 0 * self.dead(x)
"""


def test_unused_parameters_and_zero_gradients_leave_ranks_in_agreement(tmp_path):
    results = fine(
        TRAIN
        + BRANCHES
        + f"""
told = {{}}
for name in {CODECS!r}:
    before = Branches()
    after = train(name, model=Branches(), find_unused_parameters=True)
    told[name] = dict(
        agree=agree(after),
        finite=bool(torch.isfinite(flat(after)).all()),
        dead=torch.equal(before.dead.weight, after.dead.weight),
        never=torch.equal(before.never.weight, after.never.weight),
        moved=not torch.equal(before.left.weight, after.left.weight),
    )
report(told=told)
""",
        tmp_path,
    )
    for name, told in results[0]["told"].items():
        if name == "sign":  # one bit cannot say zero
            told.update(dead=True, never=True)
        assert told == {"agree": True, "finite": True, "dead": True, "never": True, "moved": True}, name


def test_a_static_graph_keeps_working(tmp_path):
    results = fine(
        TRAIN + f"report(told={{name: agree(train(name, static_graph=True)) for name in {CODECS!r}}})", tmp_path
    )
    assert all(r["told"] == dict.fromkeys(CODECS, True) for r in results)


SCALED = """
def scaled(strategy, bad_step, *, is_given, scaler=True):
    model = make_model()
    ddp = DDP(model, find_unused_parameters=True)  # buckets that never change
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaler)
    session = wirespeed.train.attach(ddp, optimizer, strategy=strategy, scaler=scaler if is_given else None)
    scales = []
    for step in range(9):
        if step == bad_step and not scaler.is_enabled():
            continue
        x, y = batch(step)
        if step == bad_step and rank == 1:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(mse(ddp(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    held = session.state_dict()["residuals"]
    session.detach()
    return model, scales, torch.cat([v.flatten() for _, v in sorted(held.items())]) if held else torch.zeros(1)
"""


@pytest.mark.slow
def test_a_loss_scaler_changes_nothing_and_a_skipped_step_leaves_no_trace(tmp_path):
    # Scales are powers of two, so every codec's rounding scales exactly: with the scaler, its scale growing every second
    # step and one step skipped, parameters and residuals equal those of a run that never had that step.
    results = fine(
        TRAIN
        + SCALED
        + """
told = {}
for name in ["int8", "int4", "sign", "topk@5%", "half", "dense"]:
    plain, _, residual_plain = scaled(name, 4, is_given=True, scaler=False)
    for is_given in (True, False):
        model, scales, residual = scaled(name, 4, is_given=is_given)
        told[f"{name} {is_given}"] = dict(
            scales=scales, agree=agree(model),
            equal=torch.equal(flat(model), flat(plain)), residual=torch.equal(residual, residual_plain),
        )
report(told=told)
""",
        tmp_path,
    )
    for mine, other in zip(results[0]["told"].items(), results[1]["told"].items(), strict=True):
        assert mine == other
        name, told = mine
        # Two good steps double the scale, the bad one halves it and starts the count again.
        assert told["scales"] == [1024.0, 2048.0, 2048.0, 4096.0, 2048.0, 2048.0, 4096.0, 4096.0, 8192.0]
        assert told["agree"], name
        assert told["residual"], name
        if not name.startswith("half"):  # its scale is found anew from what it sees, and a loss scale changes that
            assert told["equal"], name


def test_a_scaler_that_is_found_late_leaves_ranks_in_agreement(tmp_path):
    results = fine(
        TRAIN
        + SCALED
        + """
model, scales, residual = scaled("int8", 0, is_given=False)
report(agree=agree(model), first=scales[0], finite=bool(torch.isfinite(residual).all()))
""",
        tmp_path,
    )
    assert all(r == {"agree": True, "first": 512.0, "finite": True} for r in results)


@pytest.mark.slow
def test_uneven_inputs_are_joined_or_refused(tmp_path):
    results = fine(
        TRAIN
        + """
from torch.distributed.algorithms.join import Join

def joined(strategy, **options):
    model, ddp, optimizer, session = start(strategy)
    with Join([ddp], **options):
        for step in range(4 + 3 * rank):
            x, y = batch(step)
            optimizer.zero_grad()
            mse(ddp(x), y).backward()
            optimizer.step()
    session.detach()
    return model

told = {name: agree(joined(name)) for name in ["int8", "topk@5%", "half", "dense"]}
refused = []
for strategy, options in [
    ("local_sgd@2", {}), ("int8/delayed", {}), ("auto", {}), ("int8", {"divide_by_initial_world_size": False})
]:
    try:
        joined(strategy, **options)
    except wirespeed.UsageError as fault:
        refused.append(str(fault))
    dist.barrier()  # the refusal comes from the forward: one rank may be there before the other has made its groups
report(told=told, refused=refused)
""",
        tmp_path,
    )
    for result in results:
        assert result["told"] == {"int8": True, "topk@5%": True, "half": True, "dense": True}
        assert len(result["refused"]) == 4
        assert all("Join" in text for text in result["refused"])


def test_compiled_models_exchange_as_others_do(tmp_path):
    results = fine(
        TRAIN
        + """
told = {}
plain = train("int8")
inside = make_model()
compiled = train("int8", model=torch.compile(inside, backend="eager"))
model = make_model()
ddp = DDP(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
outside = torch.compile(ddp, backend="eager")
session = wirespeed.train.attach(outside, optimizer, strategy="int8")
for step in range(6):
    x, y = batch(step)
    optimizer.zero_grad()
    mse(outside(x), y).backward()
    optimizer.step()
report(inside=torch.equal(flat(inside), flat(plain)), outside=torch.equal(flat(model), flat(plain)),
       steps=session.report().num_steps)
""",
        tmp_path,
    )
    assert all(r == {"inside": True, "outside": True, "steps": 6} for r in results)


def test_two_models_in_one_process_and_the_users_own_collectives_do_not_meet(tmp_path):
    results = fine(
        TRAIN
        + """
def both(with_others):
    one, ddp_one, optimizer_one, session_one = start("int8")
    two, ddp_two, optimizer_two, session_two = start("topk@5%", make_model((64, 128, 8), seed=3))
    sums, works = [], []
    for step in range(6):
        x, y = batch(step)
        optimizer_one.zero_grad()
        optimizer_two.zero_grad()
        if with_others:
            mine = torch.full((1000,), float(rank + step))
            works.append((mine, dist.all_reduce(mine, async_op=True)))
        # One backward through both models, then one through the second alone, as adversarial training does.
        (mse(ddp_one(x), y) + mse(ddp_two(x), y)).backward()
        optimizer_one.step()
        optimizer_two.step()
        optimizer_two.zero_grad()
        mse(ddp_two(x), -y).backward()
        if with_others:
            dist.broadcast(torch.ones(10), src=0)
        optimizer_two.step()
    for step, (mine, work) in enumerate(works):
        work.wait()
        sums.append(float(mine[0]) == sum(r + step for r in range(num_ranks)))
    session_one.detach()
    session_two.detach()
    return one, two, all(sums)

one, two, _ = both(False)
one_too, two_too, is_right = both(True)
report(agree=[agree(m) for m in (one, two)], right=is_right,
       equal=[torch.equal(flat(one), flat(one_too)), torch.equal(flat(two), flat(two_too))])
""",
        tmp_path,
        num_ranks=3,
    )
    assert all(r == {"agree": [True, True], "right": True, "equal": [True, True]} for r in results)


def test_parameters_of_several_types_are_all_exchanged(tmp_path):
    results = fine(
        TRAIN
        + """
class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.a = torch.nn.Linear(64, 256)
        self.b = torch.nn.Linear(256, 256).to(torch.bfloat16)
        self.c = torch.nn.Linear(256, 8).to(torch.float64)

    def forward(self, x):
        return self.c(self.b(self.a(x).to(torch.bfloat16)).double()).float()

told = {}
dense = train("dense", model=Mixed())
for name in ["half", "int8", "int4", "topk@50%", "lowrank@4"]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = train(name, model=Mixed())
    ours = [str(w.message) for w in seen if "wirespeed" in str(w.message)]
    parts = {part: flat(getattr(model, part)) for part in "abc"}
    start_parts = {part: flat(getattr(Mixed(), part)) for part in "abc"}
    told[name] = dict(
        agree=all(agree(getattr(model, part)) for part in "abc"),
        moved=all(not torch.equal(parts[part], start_parts[part]) for part in "abc"),
        warnings=ours,
    )
report(told=told)
""",
        tmp_path,
    )
    for name, told in results[0]["told"].items():
        assert told["agree"], name
        assert told["moved"], name
        # bf16 goes through the codec by way of fp32; fp64 does not, and one warning says so.
        assert len(told["warnings"]) == 1, told
        assert "float64" in told["warnings"][0]


def test_a_state_of_another_group_is_refused(tmp_path):
    results = fine(
        TRAIN
        + """
model, ddp, optimizer, session = start("int8")
said = []
for change in (dict(rank=1 - rank), dict(num_ranks=3), dict(strategy="int8/local_sgd@4"), dict(schema=99)):
    try:
        session.load_state_dict(dict(session.state_dict(), **change))
        said.append("accepted")
    except wirespeed.DataError as fault:
        said.append(str(fault))
report(said=said)
""",
        tmp_path,
    )
    expected = ["expected the state of rank", "expected the state of rank", "with the schedule of", "expected schema 1"]
    assert all(part in text for r in results for part, text in zip(expected, r["said"], strict=True))


def test_what_ddp_itself_sends_around_the_hook_is_refused(tmp_path):
    results = fine(
        """
        from types import SimpleNamespace
        import torch._dynamo
        from torch.nn.parallel.distributed import _MixedPrecision

        said = []
        def refused(make, strategy="int8", optimizer=None):
            try:
                wirespeed.train.attach(make(), optimizer, strategy=strategy)
                said.append("accepted")
            except wirespeed.UsageError as fault:
                said.append(str(fault))

        refused(lambda: DDP(torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True))))
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            refused(lambda: DDP(make_model()))
        refused(lambda: DDP(make_model()), optimizer=SimpleNamespace(_amp_stash=None))
        class DeepSpeedEngine(torch.nn.Module):
            __module__ = "deepspeed.runtime.engine"
        refused(DeepSpeedEngine)
        report(said=said)
        """,
        tmp_path,
        num_ranks=1,
    )
    sparse, reducer, apex, deepspeed = results[0]["said"]
    assert "sparse=False" in sparse
    assert "python_reducer" in reducer
    assert "Apex" in apex
    assert "DeepSpeed" in deepspeed
