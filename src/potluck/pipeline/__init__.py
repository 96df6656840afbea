"""Models that no single machine holds: stages in a row, each with interchangeable servers.

Pure, no I/O:
    layout.py       blocks to stages; the stages that a machine serves
    staffing.py     who does what: the layout for the machines that are there, servers, listeners
    routing.py      which server of the next stage gets a task
    stepledger.py   one step: each micro-batch counts once in each stage, the step commits once
    rebalancing.py  where newcomers go, and who moves to the bottleneck
    planning.py     the best shape for each number of machines, by simulation
    judging.py      spot checks: which server checks which, what is rounding, who is excluded

What is computed and held:
    blocks.py       a model as blocks: cut, ties, seeded dropout
    blueprint.py    the model before it has values; any of its blocks with values
    compute.py      one stage on one server: forward, backward, the sum of gradients
    computethread.py   where a peer computes: in its one thread, or on the event loop what is short
    unitstate.py    one unit: parameters and their optimizer       holding.py   all that a peer holds, or loads
    cuts.py         the whole state on a disk, unit by unit        tensorfile.py   in safetensors files
    profiling.py    what each block costs on this machine

Who does it, on links:
    messages.py, wire.py   what they say; activations as frames
    pushing.py      handing a micro-batch to whichever server has room
    serving.py      a stage's server                               stepend.py   averages and commits, on one peer
    feeding.py      a feeder                                       evaluating.py   held-out data, between a step's own
    witnessing.py   what passed between a server and its neighbours, told to its verifier
    verifying.py    a verifier: computes again what a server did       arithmetic.py   how a machine rounds
    averaging.py    StageGroup: the average of a unit, all or nothing
    transfer.py     a unit's state from one peer to another
    stepping.py     one step: carries out the ledger
    conducting.py   the conductor: one step after the other; new layouts; goes back to a cut
    roll.py         who is there, what each has and is to hold      saving.py   when a cut is made, and of what
    showing.py      what people see of it                           flows.py    where micro-batches flow
    book.py         the run's record: one compare-and-set for each commit
    member.py       one peer's part, whole                         following.py   who conducts
"""
