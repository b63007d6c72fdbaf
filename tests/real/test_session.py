"""A session on real ranks: every strategy averages, ranks agree, and DDP's features keep working."""

from ranks import fine, run_program

STRATEGIES = ["dense", "half", "int8", "topk@5%", "lowrank@4", "int8/64KiB"]

TRAIN = """
def train(strategy, steps=8, **ddp_options):
    model = make_model()
    ddp = DDP(model, **ddp_options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    session = wirespeed.train.attach(ddp, optimizer, strategy=strategy)
    for step in range(steps):
        x, y = batch(step)
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, session
"""


def test_ranks_hold_equal_parameters_after_training(tmp_path):
    results = fine(
        TRAIN
        + f"""
found = {{}}
for strategy in {STRATEGIES!r}:
    model, session = train(strategy)
    told = session.report()
    found[strategy] = dict(agree=agree(model), steps=told.num_steps, name=told.strategy, is_timed=told.breakdown.step_s > 0)
report(found=found)
""",
        tmp_path,
        num_ranks=3,
    )
    for strategy in STRATEGIES:
        told = [r["found"][strategy] for r in results]
        assert told == [{"agree": True, "steps": 8, "name": strategy, "is_timed": True}] * 3


def test_dense_gives_what_plain_ddp_gives_bit_for_bit(tmp_path):
    results = fine(
        TRAIN
        + """
with_session = flat(train("dense")[0])
model = make_model()
ddp = DDP(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
for step in range(8):
    x, y = batch(step)
    loss = torch.nn.functional.mse_loss(ddp(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
report(equal=torch.equal(with_session, flat(model)))
""",
        tmp_path,
    )
    assert all(r["equal"] for r in results)


def test_a_faithful_strategy_stays_near_dense(tmp_path):
    # half rounds to 11 bits and int8 to 8, each step anew; over 8 steps the distance stays near one rounding.
    results = fine(
        TRAIN
        + """
dense, start = flat(train("dense")[0]), flat(make_model())
report(**{s: float((flat(train(s)[0]) - dense).norm() / (dense - start).norm()) for s in ("half", "int8")})
""",
        tmp_path,
    )
    assert 0 < results[0]["half"] < 2e-3
    assert 0 < results[0]["int8"] < 2e-2


def test_ddp_options_keep_working(tmp_path):
    results = fine(
        TRAIN
        + """
options = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
report(**{option: agree(train("int8", **{option: True})[0]) for option in options})
""",
        tmp_path,
    )
    assert results == [{"gradient_as_bucket_view": True, "find_unused_parameters": True, "static_graph": True}] * 2


def test_accumulation_without_synchronisation_sends_once(tmp_path):
    results = fine(
        """
        model = make_model()
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        session = wirespeed.train.attach(ddp, optimizer, strategy="int8")
        for step in range(6):
            optimizer.zero_grad()
            with ddp.no_sync():
                x, y = batch(2 * step)
                torch.nn.functional.mse_loss(ddp(x), y).backward()
            x, y = batch(2 * step + 1)
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        told = session.report()
        expected = sum(Strategy(codec="int8").wire_bytes(p, num_ranks) for p in [sum(q.numel() for q in model.parameters())])
        report(agree=agree(model), stated=told.stated_bytes_per_step, expected=expected)
        """,
        tmp_path,
    )
    assert all(r["agree"] for r in results)
    assert results[0]["stated"] == results[0]["expected"]


def test_dense_leaves_the_reduction_to_ddp_and_still_tells_where_the_time_goes(tmp_path):
    results = fine(
        """
        import contextlib, time

        model = make_model()
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        session = wirespeed.train.attach(ddp, optimizer, strategy="dense")
        hooks = [len(ddp._comm_hooks)]
        for step in range(12):
            for accumulating in (True, False):  # of two backwards the second exchanges
                x, y = batch(2 * step + accumulating)
                with ddp.no_sync() if accumulating else contextlib.nullcontext():
                    torch.nn.functional.mse_loss(ddp(x), y).backward()
            if rank == 1:
                time.sleep(0.02)  # before the next forward: the others wait in their exchange
            optimizer.step()
            optimizer.zero_grad()
        told = session.report()
        num_elements = sum(p.numel() for p in model.parameters())
        for strategy in (Strategy(codec="int8"), Strategy()):  # of one bucket size
            session.switch(strategy)
            hooks.append(len(ddp._comm_hooks))
            for step in range(3):
                x, y = batch(step)
                torch.nn.functional.mse_loss(ddp(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        session.detach()
        left = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
        report(
            hooks=hooks, left=left, agree=agree(model), steps=told.num_steps, exposed_s=told.breakdown.exposed_s,
            backward_s=told.breakdown.backward_s, stated=told.stated_bytes_per_step,
            expected=Strategy().wire_bytes(num_elements, num_ranks),
        )
        """,
        tmp_path,
    )
    for told in results:
        assert told["hooks"] == [0, 1, 0]
        assert told["left"] == 0
        assert told["agree"]
        assert told["steps"] == 12
        assert told["stated"] == told["expected"]
        assert told["backward_s"] > 0
    assert results[0]["exposed_s"] > 0.01


def test_under_dense_an_error_of_the_backend_is_explained_behind_its_traceback(tmp_path):
    end, _ = run_program(
        """
        model = make_model()
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        wirespeed.train.attach(ddp, optimizer, strategy="dense")
        for step in range(50):
            if step == 3 and rank == 1:
                os._exit(0)
            x, y = batch(step)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        """,
        tmp_path,
        num_ranks=2,
        timeout_s=150,
    )
    assert end.returncode == 1, end
    assert any("wirespeed: exchanging gradients failed" in line and "rank died" in line for line in end.tail[0]), (
        end.tail
    )


def test_all_ranks_switch_together_and_go_on_agreeing(tmp_path):
    results = fine(
        """
        model = make_model()
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        session = wirespeed.train.attach(ddp, optimizer, strategy="dense")
        names = ["dense", "int8/64KiB", "topk@5%", "half", "lowrank@2", "dense"]
        for step in range(15):
            session.switch(Strategy.parse(names[step // 3])) if step % 3 == 0 else None
            x, y = batch(step)
            loss = torch.nn.functional.mse_loss(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(agree=agree(model), steps=session.report().num_steps)
        """,
        tmp_path,
    )
    assert all(r == {"agree": True, "steps": 15} for r in results)


def test_a_checkpoint_resumes_bit_by_bit(tmp_path):
    strategies = ["half", "int8", "topk@5%", "lowrank@2"]
    results = fine(
        """
        def start(strategy):
            model = make_model()
            # Buckets that never change: int8 blocks then begin at the same elements before and after.
            ddp = DDP(model, find_unused_parameters=True)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            return model, ddp, optimizer, wirespeed.train.attach(ddp, optimizer, strategy=strategy)

        def steps(ddp, optimizer, numbers):
            for step in numbers:
                x, y = batch(step)
                loss = torch.nn.functional.mse_loss(ddp(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        found = {}
        for strategy in STRATEGIES:
            model, ddp, optimizer, session = start(strategy)
            steps(ddp, optimizer, range(5))
            held = {k: v.clone() for k, v in model.state_dict().items()}
            state = session.state_dict()
            steps(ddp, optimizer, range(5, 9))
            straight = flat(model)
            session.detach()
            model, ddp, optimizer, session = start(strategy)
            model.load_state_dict(held)
            session.load_state_dict(state)
            steps(ddp, optimizer, range(5, 9))
            are_plain = all(isinstance(v, torch.Tensor) for v in state["residuals"].values())
            found[strategy] = dict(equal=torch.equal(straight, flat(model)), plain=are_plain)
        report(found=found)
        """.replace("STRATEGIES", repr(strategies)),
        tmp_path,
    )
    assert [r["found"] for r in results] == [{s: {"equal": True, "plain": True} for s in strategies}] * 2


def test_off_switches_everything_off(tmp_path):
    results = fine(
        TRAIN
        + """
model, session = train("int8")
report(agree=agree(model), steps=session.report().num_steps)
""",
        tmp_path,
        env={"WIRESPEED_OFF": "1"},
    )
    assert all(r == {"agree": True, "steps": 0} for r in results)


def test_detaching_leaves_a_model_that_trains_densely(tmp_path):
    results = fine(
        TRAIN
        + """
model, session = train("topk@5%")
session.detach()
model2 = make_model()
ddp = DDP(model2)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
session = wirespeed.train.attach(ddp, optimizer, strategy="topk@5%")
session.detach()
reference = make_model()
other = DDP(reference)
optimizer2 = torch.optim.SGD(other.parameters(), lr=0.05)
for step in range(4):
    x, y = batch(step)
    for net, opt in ((ddp, optimizer), (other, optimizer2)):
        opt.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        opt.step()
report(equal=torch.equal(flat(model2), flat(reference)))
""",
        tmp_path,
    )
    assert all(r["equal"] for r in results)


def test_gradients_of_another_type_are_averaged_densely_with_one_warning(tmp_path):
    results = fine(
        """
        model = make_model().to(torch.float64)
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        session = wirespeed.train.attach(ddp, optimizer, strategy="int8")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for step in range(3):
                x, y = batch(step)
                loss = torch.nn.functional.mse_loss(ddp(x.double()), y.double())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        ours = [str(w.message) for w in seen if "wirespeed" in str(w.message)]
        report(agree=agree(model), warnings=ours)
        """,
        tmp_path,
    )
    assert results[0]["agree"]
    assert len(results[0]["warnings"]) == 1
    assert "float64" in results[0]["warnings"][0]


def test_a_rank_that_dies_fails_the_others_with_a_peer_failure(tmp_path):
    end, _ = run_program(
        """
        model = make_model()
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        wirespeed.train.attach(ddp, optimizer, strategy="int8")
        try:
            for step in range(50):
                if step == 3 and rank == 1:
                    os._exit(0)
                x, y = batch(step)
                loss = torch.nn.functional.mse_loss(ddp(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        except Exception as fault:
            print(f"{type(fault).__name__}: {fault}", flush=True)
            os._exit(4)
        """,
        tmp_path,
        num_ranks=2,
        timeout_s=150,
    )
    assert end.returncode == 4, end
    assert any("PeerFailure" in line and "rank died" in line for line in end.tail[0]), end.tail


REFUSED = [
    ("wirespeed.train.attach(make_model())", "expected a torch.nn.parallel.DistributedDataParallel"),
    (
        "ddp = DDP(make_model()); ddp.register_comm_hook(None, lambda state, bucket: None); wirespeed.train.attach(ddp)",
        "communication hook already",
    ),
    (
        "ddp = DDP(make_model()); wirespeed.train.attach(ddp, strategy='dense'); wirespeed.train.attach(ddp, strategy='dense')",
        "has a session already",
    ),
    ("wirespeed.train.attach(DDP(make_model()), strategy='int9')", "CODEC"),
    ("wirespeed.train.attach(DDP(make_model()), fidelity='best')", "one of exact, half, compressed, lossy"),
    ("wirespeed.train.attach(DDP(make_model()), strategy='absent.toml')", "cannot read strategy file"),
]


def test_what_cannot_be_attached_is_refused_clearly(tmp_path):
    (result,) = fine(
        f"""
said = []
for program in {[program for program, _ in REFUSED]!r}:
    try:
        exec(program)
        said.append("accepted")
    except wirespeed.UsageError as fault:
        said.append(str(fault))
report(said=said)
""",
        tmp_path,
        num_ranks=1,
    )
    for (program, message), said in zip(REFUSED, result["said"], strict=True):
        assert message in said, program
