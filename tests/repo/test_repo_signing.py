"""Signatures of versions, and what refuses to go on without one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from repo_tools import make_model

pytest.importorskip("cryptography", reason="needs the extra `sign`")

from wirespeed.cli.main import main
from wirespeed.errors import UsageError
from wirespeed.repo import names, signing
from wirespeed.repo.cache import Cache
from wirespeed.repo.repository import Repository
from wirespeed.repo.versions import Version, read_version


@pytest.fixture
def key(tmp_path: Path) -> Path:
    signing.make_key(tmp_path / "release")
    return tmp_path / "release"


def public(key: Path) -> bytes:
    return signing.read_public(f"{key}.pub")


def reader(repository: Repository, tmp_path: Path, *keys: bytes) -> Repository:
    return Repository(repository.store, cache=Cache(tmp_path / "reader"), trusted=keys)


def test_a_signed_version_is_pulled_and_an_unsigned_one_refused(
    repository: Repository, tmp_path: Path, key: Path
) -> None:
    model = make_model(tmp_path / "m")
    repository.push(model, "m")
    (model / "config.json").write_text("{}")
    repository.push(model, "m", sign_with=key)
    careful = reader(repository, tmp_path, public(key))
    assert careful.pull("m@v2").number == 2
    with pytest.raises(signing.SignatureMissing, match="m@v1 is not signed"):
        careful.pull("m@v1")
    signing.add(repository.store, repository.version("m@v1"), signing.read_secret(key))
    assert careful.pull("m@v1").number == 1


def test_one_trusted_key_of_several_is_enough_and_others_count_for_nothing(
    repository: Repository, tmp_path: Path, key: Path
) -> None:
    signing.make_key(tmp_path / "other")
    repository.push(make_model(tmp_path / "m"), "m", sign_with=tmp_path / "other")
    with pytest.raises(signing.SignatureMissing, match="1 other or wrong"):
        reader(repository, tmp_path, public(key)).version("m")
    both = reader(repository, tmp_path, public(key), public(tmp_path / "other"))
    assert both.version("m").number == 1


@pytest.mark.parametrize(
    "forge",
    [
        lambda version: msgspec.structs.replace(version, manifest_digest="ab" * 32),
        lambda version: msgspec.structs.replace(version, number=2),
        lambda version: msgspec.structs.replace(version, name="other"),
        lambda version: msgspec.structs.replace(
            version, signatures=(msgspec.structs.replace(version.signatures[0], signature="00" * 64),)
        ),
        lambda version: msgspec.structs.replace(
            version, signatures=(msgspec.structs.replace(version.signatures[0], signature="no hex"),)
        ),
    ],
)
def test_a_signature_fits_one_content_one_number_and_one_name(
    forge: object, repository: Repository, tmp_path: Path, key: Path
) -> None:
    repository.push(make_model(tmp_path / "m"), "m", sign_with=key)
    version = repository.version("m")
    signing.check(version, [public(key)])
    forged: Version = forge(version)  # type: ignore[operator]
    with pytest.raises(signing.SignatureMissing):
        signing.check(forged, [public(key)])


def test_a_store_that_exchanges_a_version_is_found_out(repository: Repository, tmp_path: Path, key: Path) -> None:
    model = make_model(tmp_path / "m")
    repository.push(model, "m", sign_with=key)
    (model / "config.json").write_text("{}")
    repository.push(model, "m", sign_with=key)
    # Version 1 is passed off as version 2, with its own valid signature.
    old = read_version(repository.store, "m", 1)
    assert old is not None
    repository.store.put(names.version_key("m", 2), msgspec.json.encode(msgspec.structs.replace(old, number=2)))
    with pytest.raises(signing.SignatureMissing):
        reader(repository, tmp_path, public(key)).version("m@v2")


def test_keys_are_never_overwritten_and_the_secret_is_its_owners(key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        signing.make_key(key)
    key.rename(key.with_name("moved"))
    with pytest.raises(UsageError, match="exists already"):
        signing.make_key(key)
    assert key.with_name("moved").read_bytes() == before


def test_files_that_are_no_keys_say_so(tmp_path: Path) -> None:
    (tmp_path / "no").write_text("hello")
    with pytest.raises(UsageError, match="no key to sign with"):
        signing.read_secret(tmp_path / "no")
    with pytest.raises(UsageError, match="holds no public key"):
        signing.read_public(str(tmp_path / "no"))
    with pytest.raises(UsageError, match="cannot read"):
        signing.read_public(str(tmp_path / "absent"))


def test_the_commands_sign_and_demand(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(repository.store.folder)
    model = make_model(tmp_path / "m")
    key = str(tmp_path / "k")
    assert main(["repo", "keygen", key]) == 0
    assert main(["repo", "push", str(model), url, "-n", "m"]) == 0
    assert main(["repo", "pull", "m", "-r", url, "--require-signature", f"{key}.pub"]) == 2
    assert "not signed by a key that is trusted" in capsys.readouterr().err
    assert main(["repo", "sign", "m@v1", "--key", key, "-r", url]) == 0
    assert main(["repo", "pull", "m", "-r", url, "--require-signature", f"{key}.pub"]) == 0


def test_the_environment_can_demand_signatures_of_everything_that_reads(
    repository: Repository, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.push(make_model(tmp_path / "m"), "m")
    monkeypatch.setenv("WIRESPEED_REQUIRE_SIGNATURE", f"{key}.pub")
    with pytest.raises(signing.SignatureMissing):
        Repository(repository.store, cache=Cache(tmp_path / "c")).pull("m")
