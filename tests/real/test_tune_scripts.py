"""Scripts of many shapes run unchanged: every step is counted once, and ranks agree under a compressed strategy."""

import json

import pytest
from tune_scripts import Quiet, assert_nothing_left, shaped, write_script

from wirespeed.spec.strategy import Strategy
from wirespeed.train.trace import RunDirective
from wirespeed.tune.loop import TuneOptions, Tuning
from wirespeed.tune.places import LoopbackPlace

# Appended to scripts that end by themselves: every rank must hold the same parameters.
AGREE = """
mine = torch.cat([p.detach().flatten() for p in net.parameters()])
others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(others, mine)
assert all(torch.equal(mine, other) for other in others), "ranks differ"
"""


def run_script(tmp_path, text, *arguments, strategy="int8", num_steps=12, keeps_buckets=False):
    """Run a script on two ranks under a strategy, as `tune` does. Gives the ranks' traces and the tuning."""
    script = write_script(tmp_path, text)
    options = TuneOptions(script=str(script), arguments=arguments, out=tmp_path / "out", stall_timeout_s=30.0)
    tuning = Tuning(options=options, place=LoopbackPlace(2, why="a test"), progress=Quiet())
    directive = RunDirective(
        label="run",
        strategy=Strategy.parse(strategy),
        num_steps=num_steps,
        folder=str(tuning._folder("run")),
        keeps_buckets=keeps_buckets,
    )
    traces = tuning._run_script(directive)
    assert_nothing_left(tmp_path)
    return traces


def test_a_script_with_accumulation_evaluation_a_schedule_and_modules_beside_it(tmp_path):
    (tmp_path / "helper.py").write_text("WIDTH = 64\n")
    (tmp_path / "queue.py").write_text("import helper\n")  # beside the script, named as one of Python's own
    text = shaped(
        """
        import argparse, json
        from helper import WIDTH

        def main():
            parser = argparse.ArgumentParser()
            for name in ("--steps", "--lab", "--budget"):
                parser.add_argument(name)
            parser.add_argument("files", nargs="*")
            parser.parse_intermixed_args()
            ddp = DDP(net)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
            for step in range(1, 100):
                try:
                    optimizer.zero_grad()
                    with ddp.no_sync():
                        (loss_of(ddp, 2 * step) / 2).backward()
                    (loss_of(ddp, 2 * step + 1) / 2).backward()
                    optimizer.step()
                    schedule.step()
                except Exception:
                    pass
                if step % 4 == 0:
                    net.eval()
                    with torch.no_grad():
                        print("held out", float(loss_of(net, 7)))
                    net.train()

        if __name__ == "__main__":
            if rank == 0:
                print(json.dumps([sys.argv[1:], __file__, WIDTH]))
            main()
        """
    )
    arguments = ("b.txt", "--steps", "3", "--budget=x", "a.txt", "--lab", "")
    first, second = run_script(tmp_path, text, *arguments)
    assert first.status == second.status == "complete"
    assert len(first.steps) == 12
    assert [entry.step for entry in first.training_losses] == list(range(1, 13))
    assert first.strategy.name == "int8"
    told = next(line for line in (tmp_path / "out/run/log.txt").read_text().splitlines() if line.startswith("[0] [["))
    assert json.loads(told[4:]) == [list(arguments), str(tmp_path / "train.py"), 64]


def test_a_script_with_loader_workers_autocast_and_an_optimizer_made_before_ddp(tmp_path):
    text = shaped(
        """
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self):
                return 64

            def __getitem__(self, index):
                return torch.full((64,), float(index) / 64)

        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        ddp = DDP(net, gradient_as_bucket_view=True)
        for epoch in range(3):
            for x in DataLoader(Numbers(), batch_size=16, num_workers=1):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = torch.nn.functional.mse_loss(ddp(x), x[:, :8])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        """
    )
    first, second = run_script(tmp_path, text + AGREE)
    assert (first.status, second.status) == ("complete", "complete")
    assert len(first.steps) == 12


def test_two_optimizers_of_one_model_share_a_step(tmp_path):
    text = shaped(
        """
        ddp = DDP(net)
        optimizers = [torch.optim.SGD(net[:2].parameters(), lr=0.05), torch.optim.Adam(net[2:].parameters())]
        for step in range(9):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(ddp, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        """
    )
    first, _ = run_script(tmp_path, text + AGREE, num_steps=30)
    assert first.status == "short"
    assert len(first.steps) == 9
    assert all(step.optimizer_s > 0 and step.forward_s > 0 for step in first.steps)
    # The parts of a step, both optimizers' among them, sum to its whole.
    for step in first.steps:
        parts = (step.data_s, step.forward_s, step.backward_s, step.exposed_s, step.optimizer_s, step.other_s)
        assert sum(parts) == pytest.approx(step.step_s, rel=1e-9)
    assert [entry.step for entry in first.training_losses] == list(range(1, 10))


def test_a_script_that_attaches_a_strategy_itself_is_outranked_and_told_so(tmp_path):
    text = shaped(
        """
        import wirespeed.train
        ddp = DDP(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        session = wirespeed.train.attach(ddp, optimizer, strategy="int8")
        for step in range(100):
            optimizer.zero_grad()
            loss = loss_of(ddp, step)
            loss.backward()
            optimizer.step()
            if step % 5 == 4:
                session.record(eval_loss=float(loss))
        """
    )
    first, _ = run_script(tmp_path, text, strategy="dense", keeps_buckets=True)
    assert first.strategy.codec == "dense"
    assert first.notes == ("the script asks for strategy 'int8'; `tune` decides instead",)
    assert [entry.step for entry in first.losses if entry.is_held_out] == [5, 10]
