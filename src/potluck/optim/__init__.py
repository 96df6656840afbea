"""Training together: the part that a user's own loop touches.

What users have:
    optimizer.py, options.py  `potluck.Optimizer`: a torch optimizer that steps when the run has done its batch
    diloco.py                 `potluck.DiLoCo` and its relatives: many local steps, then one exchange
    sharedoptimizer.py        what the two have in common: pace, reports, handing in
    auxiliary.py              an aux peer's part, without a model

One small interface under them all, no I/O:
    method.py                 Method: what is averaged, and what becomes of it; StateSource: where states come from
    targetbatch.py            gradients are averaged, all take the same step
    localupdates.py           steps at once, states are averaged
    outerloop.py              changes of parameters are averaged, an outer optimizer steps
    stride.py                 how many local steps a peer takes until the next exchange
    methods/                  outer optimizers, codecs with a memory, streaming, quorum: one a file

What they work on:
    modelstate.py, parameters.py, accumulator.py, gradscaler.py   a model, its optimizer, its gradients

Drivers:
    driver.py                 a method's way through the epochs: rounds and delays
    staging.py                what a round averages, copied between a GPU and the CPU beside training
    recovery.py               the state it stands on: at the start, caught up with, repaired, rolled back
    lastgood.py               what it is rolled back to
    epochlistener.py          epochs that pass while that state is on its way
    collaboration.py          averager, progress and keeper of a group, started and closed together
    keptstates.py             the run's keepers (state/) as its source of states
    progress/                 how far the run is towards its next epoch
    cores.py                  how many threads, where several peers share a machine
    compiler.py               torch's compiler, imported later than the rest
    lamb.py                   the LAMB optimizer
"""
