"""Laws of host lists: what is written as a list reads back as its hosts, and nothing else ever escapes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wirespeed.errors import UsageError
from wirespeed.launch import expand_hostlist

names = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@given(st.lists(names, min_size=1, max_size=20))
def test_plain_names_come_back(hosts: list[str]) -> None:
    assert expand_hostlist(",".join(hosts)) == tuple(hosts)


@given(names, st.integers(0, 5000), st.integers(0, 200), st.integers(1, 6), names)
def test_a_range_names_each_number_once_at_one_width(
    prefix: str, first: int, more: int, width: int, suffix: str
) -> None:
    hosts = expand_hostlist(f"{prefix}[{first:0{width}d}-{first + more}]{suffix}")
    assert hosts == tuple(f"{prefix}{number:0{width}d}{suffix}" for number in range(first, first + more + 1))


@given(st.lists(st.tuples(names, st.lists(st.integers(0, 99), min_size=1, max_size=4)), min_size=1, max_size=4))
def test_the_number_of_hosts_is_the_sum_over_the_words(words: list[tuple[str, list[int]]]) -> None:
    text = ",".join(f"{name}[{','.join(map(str, numbers))}]" for name, numbers in words)
    assert len(expand_hostlist(text)) == sum(len(numbers) for _, numbers in words)


@given(st.text(alphabet="ab019[]-, x()", max_size=30))
def test_any_text_gives_hosts_or_a_usage_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except UsageError:
        return
    assert hosts
    assert not any(letter in host for host in hosts for letter in "[], ")
