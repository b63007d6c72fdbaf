"""What backends raise when a rank is gone is told as a peer's failure, once, and nothing else is."""

import pytest

pytest.importorskip("torch")

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.train.lanes import as_peer_failure, peer_failures

pytestmark = pytest.mark.torch

# As gloo (torch 2.13) says it when a rank is killed, stopped or cut off.
SAID = [
    "[/p/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2961.",
    "[/p/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 5000ms for send operation to complete",
    "Application timeout caused pair closure",
    "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused",
]


@pytest.mark.parametrize("text", SAID)
def test_what_gloo_says_of_a_lost_rank_is_a_peers_failure(text):
    told = as_peer_failure(RuntimeError(text))
    assert isinstance(told, PeerFailure)
    assert text in str(told)
    assert "a rank died" in str(told)
    assert as_peer_failure(told) is told, "it is not wrapped again on its way"
    with pytest.raises(PeerFailure, match="a rank died"), peer_failures():
        raise RuntimeError(text)


def test_other_errors_stay_what_they_are():
    for fault in (RuntimeError("shape '[4, 4]' is invalid for input of size 15"), UsageError("a timeout below zero")):
        assert as_peer_failure(fault) is fault
        with pytest.raises(type(fault)), peer_failures():
            raise fault
