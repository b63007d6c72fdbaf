"""Fan-out: one version to any number of hosts in about the time of one copy.

    warm        what an operator or a program calls: plan a chain over the hosts, start it, follow it to its end
    peer        the daemon on every host: takes versions from the host before it, gives them to the host behind it
    tracker     who is there and who has what; soft state, may die and come back
    download    pieces from the best upstream, which is passed over where it is dead, slow or wrong
    intake      what has arrived: put together, verified, given on, written
    board       what a host has of one version, in memory and on disk, and who waits for which piece of it
    source      the door of ``repo.pull`` to all that
    asks        which pieces to ask for
    chain       the order of the hosts; which upstream is slow: arithmetic
    messages    what peers say to each other

docs/design/0014 tells how it works and why.
"""
