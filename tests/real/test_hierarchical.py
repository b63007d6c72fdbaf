"""The hierarchical topology on real ranks that say they are on two hosts: averages, agreement, bytes, refusals."""

import pytest
from ranks import fine

LOOP = """
mse = torch.nn.functional.mse_loss

def train(strategy, steps=8, hosts=lambda rank: rank // 2):
    os.environ["WIRESPEED_HOST"] = f"h{hosts(rank)}"
    model = make_model()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    session = wirespeed.train.attach(ddp, optimizer, strategy=strategy)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        mse(ddp(x), y).backward()
        optimizer.step()
    session.synchronize()
    told = session.report()
    session.detach()
    return model, told

begin = flat(make_model())
def distance(one, other):
    return float((flat(one) - flat(other)).norm() / (flat(one) - begin).norm())
"""


@pytest.mark.slow
def test_two_hosts_of_two_ranks_average_as_four_ranks_do(tmp_path):
    results = fine(
        LOOP
        + """
dense, _ = train("dense")
told = {}
for name in ["dense/hierarchical", "half/hierarchical", "int8/64KiB/hierarchical", "int4/hierarchical",
             "sign/hierarchical", "topk@50%/hierarchical", "int8/hierarchical/delayed", "int8/hierarchical/local_sgd@3"]:
    model, report_ = train(name)
    told[name] = dict(agree=agree(model), distance=distance(dense, model), finite=bool(torch.isfinite(flat(model)).all()))
mixed, _ = train("int8/64KiB/hierarchical", hosts=lambda rank: rank % 2)
report(told=told, mixed=dict(agree=agree(mixed), distance=distance(dense, mixed)))
""",
        tmp_path,
        num_ranks=4,
    )
    for result in results:
        told = result["told"]
        assert all(t["agree"] and t["finite"] for t in told.values()), told
        assert told["dense/hierarchical"]["distance"] < 2e-5  # fp32 in another order
        assert told["half/hierarchical"]["distance"] < 2e-3
        assert told["int8/64KiB/hierarchical"]["distance"] < 2e-2
        assert result["mixed"]["agree"]
        assert result["mixed"]["distance"] < 2e-2


def test_a_host_sends_a_bucket_once_however_many_ranks_it_has(tmp_path):
    results = fine(
        LOOP
        + """
_, told = train("int8/hierarchical")
num_elements = sum(p.numel() for p in make_model().parameters())
report(nic=told.nic_bytes_per_step, stated=told.stated_bytes_per_step, n=num_elements,
       flat=Strategy.parse("int8").nic_bytes(num_elements, 4, ranks_per_host=2))
""",
        tmp_path,
        num_ranks=4,
    )
    told = results[0]
    # 84,488 parameters: a share of 42,244 for each of two ranks, of which each of two hosts owns 21 blocks of 1024 with
    # an fp32 scale each. Both ranks send one such record in the all_to_all and one in the all_gather.
    assert told["n"] == 64 * 256 + 256 + 256 * 256 + 256 + 256 * 8 + 8
    assert told["nic"] == 2 * 2 * (21 * 1024 + 21 * 4)
    # Inside the host each rank sends half of the bucket in fp32, twice.
    assert told["stated"] == told["nic"] / 2 + 2 * 4 * 42_244
    # Flat, each of a host's ranks sends to both ranks elsewhere, and the ring of the all_gather passes once.
    assert told["flat"] > 1.2 * told["nic"]


def test_hosts_that_cannot_be_told_apart_or_are_unlike_are_refused(tmp_path):
    results = fine(
        LOOP
        + """
said = []
for hosts in (lambda rank: 0, lambda rank: rank // 2):
    try:
        train("int8/hierarchical", hosts=hosts)
        said.append("accepted")
    except wirespeed.UsageError as fault:
        said.append(str(fault))
    dist.barrier()
_, told = train("int8/hierarchical", hosts=lambda rank: rank)
report(said=said, alone=told.strategy, buckets=[list(b.stages_s) for b in told.buckets][0])
""",
        tmp_path,
        num_ranks=3,
    )
    for result in results:
        one_host, unlike = result["said"]
        assert "all 3 ranks are on one host" in one_host
        assert "from 1 to 2 ranks" in unlike
        # One rank per host: nothing to sum inside, the flat exchange is the same thing.
        assert result["buckets"] == ["encode", "reduce", "decode"]
