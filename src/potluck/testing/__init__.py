"""What tests of Potluck stand on; shipped, so that tests of recipes and integrations can use it too.

    polling.py       wait for a condition with a deadline, and say what was last seen
    processes.py     real child processes: output, signals, certain clean-up
    forkserver.py    Python children that need not import torch again: forked from a template (forktemplate.py)
    faults.py        faults at named points of a child process, with a record that they fired
    faulty.py        runs a program with those faults: `python -m potluck.testing.faulty -m potluck.cli.main …`
    accelerator.py   a pretend GPU: a second torch device, whose copies and waits are counted
    leaks.py         threads, sockets and tasks that a test left behind
    ports.py         a TCP port that nobody uses
    smalldisk.py     a disk that can be filled, in memory
    plainhub.py      a bare nats-server that can be killed, started again, and told which users to let in
    forwarder.py     a TCP forwarder that can be shut, opened and frozen
    natlab.py        hosts, home routers and a public network, in network namespaces
    namespaces.py    the namespaces it is made of, and their removal
    cuts.py          paths that are blocked while in use
    shaping.py       links with a rate, delay, jitter and loss
    shaper.py        the program that does it in user space
    languages.py     documents in made-up languages
    podman.py        a container engine, with a small image
    queuework.py     puts, takes and finishes items of a queue, and records what became of each
    slotlines.py     such links for local spot machines, which outlive the program that made them

Product code never imports this package: it only calls `potluck.faultpoints.reach`, which does nothing by default.
"""
