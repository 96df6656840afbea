"""Models that no single machine holds: stages in a row, each with interchangeable servers.

Pure, no I/O:
    layout.py       blocks to stages; the stages that a machine serves
    routing.py      which server of the next stage gets a task
    stepledger.py   one step: each micro-batch counts once in each stage, the step commits once
    rebalancing.py  where newcomers go, and who moves to the bottleneck
    planning.py     the best shape for each number of machines, by simulation

What is computed:
    blocks.py       a model as blocks: cut, ties, seeded dropout
    compute.py      one stage on one server: forward, backward, the sum of gradients
    profiling.py    what each block costs on this machine

Who does it, on links:
    messages.py, wire.py   what they say; activations as frames
    pushing.py      handing a micro-batch to whichever server has room
    serving.py      a stage's server
    feeding.py      a feeder
    averaging.py    StageGroup: the average of a stage, all or nothing
    conducting.py   the conductor: carries out the ledger, commits by a StepBook
"""
