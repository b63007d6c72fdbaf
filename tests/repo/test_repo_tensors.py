from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from repo_tools import make_model, safetensors_bytes

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from wirespeed.errors import DataError, MissingCapability, UsageError  # noqa: E402
from wirespeed.repo.cache import Cache  # noqa: E402
from wirespeed.repo.checkpoints import RepoReader, RepoWriter, Saver  # noqa: E402
from wirespeed.repo.repository import Repository  # noqa: E402
from wirespeed.repo.store import Store  # noqa: E402
from wirespeed.repo.tensors import file_system_of, load, save  # noqa: E402
from wirespeed.system import free_port  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(500, 300, generator=generator)
    return {
        "w": weight.to(torch.bfloat16), "f": weight[:10].contiguous(), "ids": torch.arange(7), "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4), "flags": torch.tensor([True, False]), "t": weight.t(), "c": torch.zeros(3, dtype=torch.complex64),
        "tied": weight, "tied.too": weight,
    }  # fmt: skip


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("way", ["cache", "memory", "auto"])
def test_what_is_saved_is_loaded(store: Store, tmp_path: Path, way: str) -> None:
    repository = Repository(store, cache=Cache(tmp_path / "cache"))
    save(state(), "m", repo=repository)
    found = load("m", repo=repository, way=way)  # type: ignore[arg-type]
    assert_same(found, state())
    assert found["tied"].data_ptr() == found["tied.too"].data_ptr()


def test_the_file_that_is_saved_is_one_that_safetensors_reads(repository: Repository, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {name: tensor for name, tensor in state().items() if name != "c"}
    save(tensors, "m", repo=repository, metadata={"format": "pt"})
    repository.pull("m", to=tmp_path / "out")
    found = library.load_file(tmp_path / "out" / "model.safetensors")
    assert_same(found, {name: t for name, t in tensors.items() if name in found})
    assert set(tensors) - set(found) == {"tied.too"}


def test_writing_to_a_loaded_tensor_does_not_change_the_cache(repository: Repository) -> None:
    save(state(), "m", repo=repository)
    load("m", repo=repository)["w"].zero_()
    assert_same(load("m", repo=repository), state())


def test_only_what_is_asked_for_is_read(repository: Repository, tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((400_000,), float(i)) for i in range(6)}
    save(tensors, "m", repo=repository)
    reads: list[int] = []
    real = repository.store.get_range
    repository.store.get_range = lambda key, start, length, **options: reads.append(length) or real(key, start, length)  # type: ignore[method-assign, func-returns-value]
    found = load("m", repo=repository, way="memory", only=lambda name: name == "w4")
    assert list(found) == ["w4"]
    assert torch.equal(found["w4"], tensors["w4"])
    assert sum(reads) < 2_000_000


def test_a_cache_without_room_is_passed_by(folder_store: Store, tmp_path: Path) -> None:
    small = Repository(folder_store, cache=Cache(tmp_path / "cache", limit_bytes=1000))
    save(state(), "m", repo=small)
    assert_same(load("m", repo=small), state())
    with pytest.raises(MissingCapability):
        load("m", repo=small, way="cache")


def test_sharded_files_are_one_dictionary_and_clashes_are_refused(repository: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for at in range(2):
        content = safetensors_bytes({f"t{at}": ("F32", (2,), bytes(8))})
        (folder / f"model-{at}.safetensors").write_bytes(content)
    repository.push(folder, "m")
    assert set(load("m", repo=repository)) == {"t0", "t1"}
    (folder / "model-2.safetensors").write_bytes(content)
    repository.push(folder, "m")
    with pytest.raises(DataError, match="in two files"):
        load("m", repo=repository)


def test_tensors_that_are_not_aligned_are_copied(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"a": ("U8", (3,), b"abc"), "b": ("F32", (1,), bytes([0, 0, 128, 63]))}))
    repository.push(path, "m")
    assert load("m", repo=repository)["b"].tolist() == [1.0]


def test_a_version_without_tensors_says_so(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    repository.push(tmp_path / "x.txt", "m")
    with pytest.raises(UsageError, match="no safetensors"):
        load("m", repo=repository)


def test_network_file_systems_are_told_from_mountinfo() -> None:
    mounts = "22 1 0:20 / / rw - ext4 /dev/a rw\n30 22 0:30 / /mnt/my\\040nfs rw - nfs4 host:/x rw\n31 22 0:31 / /mnt rw - tmpfs t rw"
    assert file_system_of(Path("/mnt/my nfs/cache"), mounts) == "nfs4"
    assert file_system_of(Path("/mnt/other"), mounts) == "tmpfs"
    assert file_system_of(Path("/home"), mounts) == "ext4"


def test_saving_against_a_parent_sends_differences(repository: Repository) -> None:
    weights = {"w": (torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * 0.02)}
    half = {"w": weights["w"].bfloat16()}
    save(half, "m", repo=repository)
    moved = {"w": (weights["w"] + torch.randn(1_000_000, generator=torch.Generator().manual_seed(1)) * 3e-7).bfloat16()}
    pushed = save(moved, "m", repo=repository, parent="v1")
    assert pushed.delta_payload_bytes < 0.012 * 2_000_000
    assert torch.equal(load("m", repo=repository)["w"], moved["w"])


def test_a_scheduled_saver_saves_when_due_and_anchors(repository: Repository) -> None:
    saver = Saver("run", repo=repository, every_s=3600, anchor_every=2)
    base = torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 0.02
    assert not saver.step({"w": base})
    states = []
    for _ in range(4):
        base = base + 3e-7
        states.append(base.bfloat16())
        tensors = {"w": states[-1].clone()}
        assert saver.step(tensors, is_due=True)
        tensors["w"].zero_()  # training goes on at once
        saver.close()
    assert [pushed.version.parent for pushed in saver.saved] == [None, 1, None, 3]
    for number, wanted in enumerate(states, 1):
        assert torch.equal(load(f"run@{number}", repo=repository)["w"], wanted)


def test_a_savers_failure_reaches_the_training_loop(repository: Repository) -> None:
    saver = Saver("run", repo=repository)
    assert saver.step({"__metadata__": torch.zeros(1)}, is_due=True)
    with pytest.raises(UsageError, match="__metadata__"):
        saver.close()


def test_a_checkpoint_of_model_and_optimizer_comes_back(repository: Repository) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 5))
        return model, torch.optim.AdamW(model.parameters())

    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = make(0)
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    first, second = get_state_dict(model, optimizer)
    writer = RepoWriter("run", repo=repository)
    dcp.save({"model": first, "optimizer": second, "epoch": 7}, storage_writer=writer, no_dist=True)
    assert writer.version is not None
    other, other_optimizer = make(1)
    a, b = get_state_dict(other, other_optimizer)
    wanted = {"model": a, "optimizer": b, "epoch": 0}
    dcp.load(wanted, storage_reader=RepoReader("run", repo=repository), no_dist=True)
    set_state_dict(other, other_optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
    assert wanted["epoch"] == 7
    assert all(torch.equal(x, y) for x, y in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert [p for _, p in repository.verify("run")] == [[]]


def test_a_checkpoint_of_what_did_not_change_sends_almost_nothing(repository: Repository) -> None:
    tensors = {"w": torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))}
    before = {stat.key for stat in repository.store.list_objects("objects")}
    for _ in range(2):
        dcp.save(dict(tensors), storage_writer=RepoWriter("run", repo=repository), no_dist=True)
    sizes = [stat.size_bytes for stat in repository.store.list_objects("objects") if stat.key not in before]
    assert 4_000_000 < sum(sizes) < 4_010_000


class Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.proof}",)


def test_a_pickle_that_would_run_code_is_refused(repository: Repository, tmp_path: Path) -> None:
    dcp.save({"x": Evil(tmp_path / "evil")}, storage_writer=RepoWriter("run", repo=repository), no_dist=True)
    with pytest.raises(CheckpointException, match="may run code"):
        dcp.load({"x": 0}, storage_reader=RepoReader("run", repo=repository), no_dist=True)
    assert not (tmp_path / "evil").exists()


def test_what_is_no_checkpoint_says_so(repository: Repository, tmp_path: Path) -> None:
    repository.push(make_model(tmp_path / "m"), "m")
    with pytest.raises(CheckpointException, match="no distributed checkpoint"):
        dcp.load({"x": torch.zeros(1)}, storage_reader=RepoReader("m", repo=repository), no_dist=True)


RESHARD = """
import os, sys, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from wirespeed.repo.checkpoints import RepoReader, RepoWriter  # noqa: E402
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
rank, size, what, repo, port = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
mesh = init_device_mesh("cpu", (size,))
whole = torch.arange(1003 * 6, dtype=torch.float32).reshape(1003, 6)
if what == "save":
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, storage_writer=RepoWriter("run", repo=repo))
else:
    for dim in (0, 1):
        target = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(dim)])}
        dcp.load(target, storage_reader=RepoReader("run", repo=repo))
        assert torch.equal(target["w"].full_tensor(), whole)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_checkpoint_of_four_ranks_loads_on_two_and_three_along_either_dimension(tmp_path: Path) -> None:
    script = tmp_path / "reshard.py"
    script.write_text(RESHARD)
    for what, size in (("save", 4), ("load", 2), ("load", 3)):
        port = free_port()
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(size), what, str(tmp_path / "store"), str(port)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=300)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * size, outputs
