"""How a machine runs jobs: one interface, a file per way.

    runner.py     the interface that agents use
    process.py    a plain process, in a session and a folder of its own
    shim.py       the small parent of such a process: it outlives the agent and writes down how the process ended
    engine.py     finds the socket of Docker or Podman
    images.py     images where `potluck fleet up` runs: found, built, saved
    container.py  a container, by the `docker` SDK on Docker's or Podman's socket
    explaining.py how a job ended, in plain language

One contract suite, tests/integration/test_runners.py, runs on both.
"""
