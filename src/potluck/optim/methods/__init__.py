"""The numbers of training together, one method a file, no I/O.

Outer optimizers: what becomes of the averaged change of the parameters.
    outer.py       the interface; plain SGD and Nesterov momentum, as DiLoCo uses them
    delayed.py     delayed Nesterov, for changes that arrive one by one

Transforms: codecs with a memory, before and after the average.
    transform.py   the interface; error feedback
    quantised.py   any of the round's codecs, down to 4 bits
    sparseloco.py  the largest values of each block in 2 bits
    decoupled.py   DeMo: the strongest frequencies of a decoupled momentum
    blocks.py      tensors in blocks of 64 × 64, for both
    powersgd.py    low rank, one factor a round

When and what:
    streaming.py   fragments of a model, each synchronised on its own, overlapped and mixed
    quorum.py      merge at a quorum plus a grace window that adapts; weights by tokens
    dylu.py        local steps by speed (DyLU)
    cadence.py     when the next round should be, for a peer that missed one
"""
