"""Numbers, leases, commits, aliases: over every kind of store, those without conditions included."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.repo import aliases, names, versions
from wirespeed.repo.names import Wanted, parse_wanted
from wirespeed.repo.store import Store
from wirespeed.repo.versions import Claim, Version


def live(claim: Claim) -> Version:
    return Version(
        name=claim.name,
        number=claim.number,
        push_id=claim.push_id,
        state="live",
        created="2026",
        manifest_digest="a" * 64,
    )


def make(store: Store, name: str = "m") -> Version:
    with Claim(store, name) as claim:
        version = live(claim)
        claim.commit(version)
    return version


def at_once(count: int, work: Callable[[int], object]) -> list[object]:
    """Results or errors of calls that start together."""
    results: list[object] = [None] * count
    gate = threading.Barrier(count)

    def run(at: int) -> None:
        gate.wait(timeout=60)
        try:
            results[at] = work(at)
        except Exception as fault:  # handed to the test
            results[at] = fault

    threads = [threading.Thread(target=run, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not any(thread.is_alive() for thread in threads), "calls that have not ended after 240 s"
    return results


def test_conditions_are_found_out_by_trying(store: Store) -> None:
    assert store.can_create is not store.url.startswith("s3://bucket/")


def test_versions_count_up_and_the_newest_is_meant(store: Store) -> None:
    assert [make(store).number for _ in range(3)] == [1, 2, 3]
    assert versions.resolve(store, Wanted(name="m")).number == 3
    assert versions.resolve(store, parse_wanted("m@v2")).number == 2
    assert versions.list_models(store) == ["m"]
    assert not list(store.list_objects("pushes"))


def test_racing_pushes_get_numbers_of_their_own(store: Store) -> None:
    made = at_once(6, lambda at: make(store).number)
    assert sorted(map(str, made)) == sorted({str(number) for number in made})
    assert [v.number for v in versions.live_versions(store, "m")] == sorted(made)  # type: ignore[type-var]


def test_a_push_whose_lease_was_broken_cannot_commit(store: Store) -> None:
    claim = Claim(store, "m")
    assert versions.break_lease(store, "m", claim.number)
    with pytest.raises(PeerFailure, match="lease"):
        claim.commit(live(claim))
    claim.end()
    assert versions.live_versions(store, "m") == []
    assert make(store).number == claim.number + 1


def test_a_committed_push_cannot_be_broken(store: Store) -> None:
    version = make(store)
    assert not versions.break_lease(store, "m", version.number)
    assert versions.live_versions(store, "m") == [version]


def test_commit_and_break_at_the_same_time_have_one_winner(store: Store) -> None:
    for _ in range(4):
        claim = Claim(store, "m")
        committed, broken = at_once(
            2,
            lambda at, claim=claim: (
                claim.commit(live(claim)) if at == 0 else versions.break_lease(store, "m", claim.number)
            ),
        )
        claim.end()
        is_live = claim.number in [v.number for v in versions.live_versions(store, "m")]
        assert is_live == (committed is None)
        # Without conditions both may step back; never may both win.
        assert not (is_live and broken is True)
        if store.can_create:
            assert is_live != broken


def test_an_answer_that_got_lost_is_no_lost_race(folder_store: Store) -> None:
    assert folder_store.create("k", b"mine")
    assert folder_store.create("k", b"mine")
    assert not folder_store.create("k", b"theirs")


def test_removed_versions_are_gone_and_their_numbers_stay_used(store: Store) -> None:
    first = make(store)
    versions.remove(store, first)
    with pytest.raises(UsageError, match="removed"):
        versions.resolve(store, Wanted(name="m", number=1))
    assert make(store).number == 2


def test_what_is_not_there_says_what_is(store: Store) -> None:
    make(store, "org/there")
    with pytest.raises(UsageError, match="org/there"):
        versions.resolve(store, Wanted(name="nothing"))
    with pytest.raises(UsageError, match=r"no version 7.*v1"):
        versions.resolve(store, Wanted(name="org/there", number=7))
    with pytest.raises(UsageError, match="no alias 'prod'"):
        versions.resolve(store, Wanted(name="org/there", alias="prod"))


def test_aliases_move_with_history_and_roll_back(store: Store) -> None:
    for _ in range(3):
        make(store)
    for number in (1, 2, 3):
        aliases.set_alias(store, "m", "prod", number)
    aliases.set_alias(store, "m", "prod-eu", 1)
    assert [entry.number for entry in aliases.history(store, "m", "prod")] == [3, 2, 1]
    assert aliases.rollback(store, "m", "prod").number == 2
    assert versions.resolve(store, parse_wanted("m@prod")).number == 2
    assert {e.alias: e.number for e in aliases.list_aliases(store, "m")} == {"prod": 2, "prod-eu": 1}


def test_an_alias_moves_only_from_where_it_is_expected(store: Store) -> None:
    for _ in range(2):
        make(store)
    aliases.set_alias(store, "m", "prod", 1)
    with pytest.raises(UsageError, match="points at v1"):
        aliases.set_alias(store, "m", "prod", 2, expect=2)
    assert aliases.set_alias(store, "m", "prod", 2, expect=1).number == 2


def test_no_setting_of_an_alias_is_lost_in_a_race(store: Store) -> None:
    make(store)
    results = at_once(5, lambda at: aliases.set_alias(store, "m", "prod", 1, message=str(at)))
    assert not [r for r in results if isinstance(r, Exception)]
    assert sorted(e.message for e in aliases.history(store, "m", "prod")) == ["0", "1", "2", "3", "4"]


def test_an_alias_keeps_its_version(store: Store) -> None:
    version = make(store)
    aliases.set_alias(store, "m", "prod", 1)
    with pytest.raises(UsageError, match="'prod'"):
        versions.remove(store, version)
    aliases.set_alias(store, "m", "prod", None)
    versions.remove(store, version)


@pytest.mark.parametrize("text", ["", "a/b/c", "../x", "a b", "-a", "a/", "a@", "a@-x", "a@v1x y", "A" * 97, "x."])
def test_bad_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_wanted(text)


def test_names_and_keys_belong_to_each_other() -> None:
    assert parse_wanted("org/m@v12") == Wanted(name="org/m", number=12)
    assert parse_wanted("m@prod") == Wanted(name="m", alias="prod")
    assert names.name_of_folder(names.versions_prefix("org/m").split("/")[1]) == "org/m"
    assert names.number_in(names.version_key("m", 12)) == 12
    assert names.parse_object_key(names.object_key(b"x" * 32, 7)) == (b"x" * 32, 7)
