"""A ring all-reduce in SimGrid: run by an interpreter that has it. Prints JSON: simulated seconds, wall seconds.

2 (p - 1) steps, in each of which every host sends 1 / p of the bytes to the next one and takes as much from the other
side. Model CM02 without TCP's window and without the 5 % that acknowledgements take of the way back: latency plus bytes
over max-min shares, as the closed form has it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

HEAD = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="c" prefix="h" suffix="" radical="0-{last}" speed="1Gf" bw="{rate}Bps" lat="{latency}s"
           sharing_policy="SPLITDUPLEX"/>
</platform>
"""


def main() -> None:
    num_hosts, size_bytes, rate_bytes_per_s, hop_s = int(sys.argv[1]), float(sys.argv[2]), *map(float, sys.argv[3:5])
    began = time.perf_counter()
    from simgrid import Actor, Engine, Mailbox

    engine = Engine(
        [
            "ring",
            "--cfg=network/model:CM02",
            "--cfg=network/TCP-gamma:0",
            "--cfg=network/crosstraffic:0",
            "--log=root.thres:error",
        ]
    )
    with tempfile.NamedTemporaryFile("w", suffix=".xml") as platform:
        # A way crosses two links, the sender's and the receiver's: half of the latency each.
        platform.write(HEAD.format(last=num_hosts - 1, rate=rate_bytes_per_s, latency=hop_s / 2))
        platform.flush()
        engine.load_platform(platform.name)
    chunk = int(size_bytes / num_hosts)

    def rank(number: int) -> None:
        out, mine = Mailbox.by_name(str((number + 1) % num_hosts)), Mailbox.by_name(str(number))
        for _ in range(2 * (num_hosts - 1)):
            sent = out.put_async("chunk", chunk)
            mine.get()
            sent.wait()

    for number in range(num_hosts):
        host = engine.host_by_name(f"h{number}")
        if hasattr(host, "add_actor"):
            host.add_actor(f"rank{number}", rank, number)
        else:
            Actor.create(f"rank{number}", host, rank, number)
    engine.run()
    print(json.dumps({"answer_s": engine.clock, "took_s": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
