from __future__ import annotations

import msgspec
import pytest

from wirespeed.errors import DataError
from wirespeed.repo.manifest import Chunk, FileEntry, Manifest, ObjectRef, check, decode, encode

OBJECT = ObjectRef(digest=bytes(32), epoch=0, size_bytes=100)
RAW = Chunk(digest=b"a" * 32, length=10, object=0, offset=0, stored_bytes=10)
DELTA = Chunk(digest=b"b" * 32, length=10, object=0, offset=10, stored_bytes=3, encoding="sparse", width=2, base=0)
FILE = FileEntry(path="a/b", size_bytes=20, sha256=bytes(32), chunks=(0, 1))
GOOD = Manifest(objects=(OBJECT,), chunks=(RAW, DELTA), files=(FILE,), folders=("c",))


def changed(thing: object, **fields: object) -> object:
    return msgspec.structs.replace(thing, **fields)  # type: ignore[type-var]


def test_what_is_encoded_is_decoded() -> None:
    assert decode(encode(GOOD), source="it") == GOOD


@pytest.mark.parametrize(
    "bad",
    [
        changed(GOOD, chunks=(changed(RAW, object=1), DELTA)),
        changed(GOOD, chunks=(changed(RAW, offset=95), DELTA)),
        changed(GOOD, chunks=(changed(RAW, length=11), DELTA)),
        changed(GOOD, chunks=(changed(RAW, digest=b"short"), DELTA)),
        changed(GOOD, chunks=(RAW, changed(DELTA, base=1))),
        changed(GOOD, chunks=(RAW, changed(DELTA, base=-1))),
        changed(GOOD, chunks=(RAW, changed(DELTA, width=3))),
        changed(GOOD, chunks=(changed(RAW, base=0), DELTA)),
        changed(GOOD, files=(changed(FILE, size_bytes=21),)),
        changed(GOOD, files=(changed(FILE, chunks=(0, 2)),)),
        changed(GOOD, files=(FILE, FILE)),
        changed(GOOD, folders=("a/b",)),
        *(
            changed(GOOD, files=(changed(FILE, path=path),))
            for path in ("../x", "/x", "a/../../x", "", "a//b", "a\0b", ".", "a\\b")
        ),
    ],
)
def test_what_makes_no_sense_is_refused(bad: Manifest) -> None:
    with pytest.raises(DataError):
        check(bad)


def test_a_chain_of_deltas_is_bounded_for_readers() -> None:
    chain = [RAW]
    for index in range(65):
        chain.append(changed(DELTA, digest=bytes([index]) * 32, base=index))  # type: ignore[arg-type]
    check(Manifest(objects=(OBJECT,), chunks=tuple(chain[:65])))
    with pytest.raises(DataError, match="65 deltas deep"):
        check(Manifest(objects=(OBJECT,), chunks=tuple(chain)))


@pytest.mark.parametrize("content", [b"", b"WSM1", b"WSM1garbage", b"nonsense" * 100])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(DataError):
        decode(content, source="it")


def test_every_flipped_byte_is_refused_or_changes_the_digest_that_names_it() -> None:
    content = encode(GOOD)
    for at in range(len(content)):
        wrong = bytearray(content)
        wrong[at] ^= 0x40
        try:
            found = decode(bytes(wrong), source="it")
        except DataError:
            continue
        # zstd frames carry no checksum here: the manifest's own digest, checked before, is what protects it.
        assert found.schema == 1


def test_a_newer_schema_says_so() -> None:
    with pytest.raises(DataError, match=r"schema 2.*upgrade"):
        decode(encode(changed(GOOD, schema=2)), source="it")  # type: ignore[arg-type]


def test_content_is_named_by_its_chunks_not_by_what_a_manifest_claims() -> None:
    claims = changed(FILE, sha256=b"x" * 32, path="other")
    assert GOOD.content_id(FILE) == GOOD.content_id(claims)  # type: ignore[arg-type]
    assert GOOD.content_id(FILE) != GOOD.content_id(changed(FILE, chunks=(0,)))  # type: ignore[arg-type]
