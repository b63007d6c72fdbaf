"""``auto`` on real ranks: all decide alike, at the same step, within the fidelity, and go back when it disappoints."""

import pytest
from ranks import fine

from wirespeed.fabric.files import write_fabric
from wirespeed.fabric.topology import CodecCurve, CollectiveCurve, Curve, Fabric, Figure, Host
from wirespeed.sim.training import STAGES

SIZES_BYTES = (1024, 2**20, 2**24)
# Between them 87,816 parameters: 343 KiB of gradients.
TRAIN = """
def train(num_steps=34, **options):
    model = make_model()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    session = wirespeed.train.attach(ddp, optimizer, **options)
    ran = []
    for step in range(num_steps):
        x, y = batch(step)
        if SLOW(session.strategy):
            time.sleep(0.05)
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        ran.append(session.strategy.name)
        optimizer.step()
    changes = [(0, ran[0])] + [(i, b) for i, (a, b) in enumerate(zip(ran, ran[1:]), 1) if a != b]
    report(agree=agree(model), changes=changes, last=session.strategy.name, notes=session.notes)
"""


def train(options: str, *, slow: str = "False") -> str:
    text = TRAIN.replace("SLOW(session.strategy)", slow)
    return f"import time\n{text}\ntrain({options})\n"


@pytest.fixture
def slow_fabric(tmp_path):
    """A fabric that claims 8 Mbit/s between the two ranks, and codecs that cost nothing: on loopback that is a lie."""

    def curve(s_per_byte):
        return Curve(
            sizes_bytes=SIZES_BYTES, times_s=tuple(1e-5 + size * s_per_byte for size in SIZES_BYTES), residual=0.0
        )

    fabric = Fabric(
        name="a lie",
        hosts=tuple(
            Host(name=f"n{i}", rate_bit_per_s=Figure(value=8e6, origin="declared"), cpus=1.0) for i in range(2)
        ),
        collectives=tuple(
            CollectiveCurve(collective=name, backend="gloo", num_ranks=2, ranks_per_host=2, curve=curve(1e-6))
            for name in ("all_reduce", "all_gather", "all_to_all")
        ),
        codecs=tuple(
            CodecCurve(codec=codec, stage=stage, kind="default", num_ranks=2, curve=curve(1e-12))
            for codec in ("half", "int8", "topk@1%", "topk@5%")
            for stage in STAGES[codec.partition("@")[0]]
        ),
    )
    return str(write_fabric(tmp_path / "lie.toml", fabric))


def test_what_disappoints_is_undone_on_all_ranks_at_the_same_step(slow_fabric, tmp_path):
    # Dense runs at full speed, everything else 50 ms slower: the prediction is wrong, and the measurement says so.
    results = fine(
        train(f"fabric={slow_fabric!r}, fidelity='compressed'", slow="session.strategy.codec != 'dense'"), tmp_path
    )
    first, second = results
    assert first["agree"]
    assert second["agree"]
    assert first["changes"] == second["changes"]
    assert [step for step, _ in first["changes"]] == [0, 14, 28]
    codecs = [name.partition("/")[0] for _, name in first["changes"]]
    assert codecs[0] == codecs[2] == "dense"
    assert codecs[1] in ("half", "int8"), "the fidelity allows no top-k"
    assert first["notes"][-1].startswith(f"back to dense: {codecs[1]}")


def test_what_holds_its_promise_stays_and_the_fidelity_is_kept(slow_fabric, tmp_path):
    # 50 ms on every dense step stand for the slow network: now the prediction is right. half is all that is allowed.
    results = fine(train(f"fabric={slow_fabric!r}", slow="session.strategy.codec == 'dense'"), tmp_path)
    first, second = results
    assert first["agree"]
    assert second["agree"]
    assert first["changes"] == second["changes"]
    assert [(step, name.partition("/")[0]) for step, name in first["changes"]] == [(0, "dense"), (14, "half")]
    assert first["last"].partition("/")[0] == "half"


def test_an_exact_fidelity_sends_exact_gradients_only(slow_fabric, tmp_path):
    results = fine(train(f"num_steps=18, fabric={slow_fabric!r}, fidelity='exact'"), tmp_path)
    assert {name.partition("/")[0] for r in results for _, name in r["changes"]} == {"dense"}
    assert all(r["agree"] for r in results)


@pytest.mark.slow
def test_auto_without_a_fabric_measures_it_on_all_ranks_and_they_agree(tmp_path):
    results = fine(train("num_steps=18"), tmp_path)
    first, second = results
    assert first["agree"]
    assert second["agree"]
    assert first["changes"] == second["changes"]
    assert {name.partition("/")[0] for _, name in first["changes"]} <= {"dense", "half"}
    assert first["notes"]


def test_a_decision_that_fails_on_rank_0_leaves_all_ranks_dense(tmp_path):
    # A fabric of three ranks has no curve for two: rank 0 cannot predict, and nobody waits for it.
    fabric = Fabric(
        name="another",
        hosts=tuple(
            Host(name=f"n{i}", rate_bit_per_s=Figure(value=1e9, origin="declared"), cpus=1.0) for i in range(3)
        ),
    )
    path = str(write_fabric(tmp_path / "other.toml", fabric))
    results = fine(train(f"num_steps=18, fabric={path!r}"), tmp_path)
    assert [r["changes"] for r in results] == [[[0, results[0]["last"]]]] * 2
    assert results[0]["last"].partition("/")[0] == "dense"
    assert "dense" in results[0]["notes"][-1]
