"""What TCP adds to bytes over rate: slow start on an idle connection, and time-outs when senders overrun a buffer.

Both never fall with size. Slow start doubles what is under way each round trip from the first window (RFC 5681, RFC
6928); losses while it overshoots, and pacing, are left out. Incast: when more than a port's buffer arrives at once,
some sender loses the last packets of its window and waits for its retransmission timer (RFC 6298; Phanishayee et al.
2008).
"""

from __future__ import annotations

import math

import numpy as np

from wirespeed.fabric.network import Floats
from wirespeed.fabric.parts import Transport


def slow_start_s(transport: Transport, message_bytes: Floats, bit_per_s: float) -> Floats:
    """Seconds by which a connection's start lengthens a message (S,), against sending at the full rate at once."""
    extra = np.zeros(message_bytes.shape)
    round_s = 2 * transport.latency_s.value
    if transport.first_window_bytes is None or round_s <= 0:
        return extra
    window = float(transport.first_window_bytes * transport.streams)
    sent = 0.0
    # Each round sends one window and then waits for its first acknowledgement, until the windows fill the round trip.
    while math.isfinite(bit_per_s) and window * 8 / bit_per_s < round_s:
        sent += window
        extra = np.where(message_bytes > sent, extra + round_s - window * 8 / bit_per_s, extra)
        if sent > message_bytes.max(initial=0.0):
            break
        window *= 2
    return extra


def incast_delay_s(transport: Transport, message_bytes: Floats, fan_in: int) -> Floats:
    """The retransmission time-out where ``fan_in`` messages (S,) that arrive at once overrun the port's buffer."""
    if transport.buffer_bytes is None or fan_in < 2:
        return np.zeros(message_bytes.shape)
    most = math.inf if transport.window_bytes is None else float(transport.window_bytes * transport.streams)
    arriving = fan_in * np.minimum(message_bytes, most)
    return np.where(arriving > transport.buffer_bytes, transport.timeout_s, 0.0)
