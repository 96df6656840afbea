"""Paths: sparse models that are larger than anybody's machine (DiPaCo).

A model has levels with several modules each; a path takes one module per level. Documents are routed to paths before
they are trained on. A peer trains a path for a phase, H inner steps, and then only the modules that it shares with
other paths are averaged: each module is a group of the run, with an outer step of its own.

    grid.py          levels, modules, paths: which path goes through which module (pure)
    cutting.py       which parameters of a model belong to which level
    weighing.py      what a path's change weighs in a module: α and √P (pure)
    phasebook.py     who trains which path: phases are leased like shards (pure)
    phasedesk.py     the book in the hub, and a trainer's leases
    phasequorum.py   when a module's round starts: it counts phases, not peers (pure)
    features.py      what a router sees of a document: its first tokens
    router.py        from features to paths: k-means, or discriminative
    sharding.py      documents by path, with tokens per path and a part for validation; the routing file
    moduleloop.py    the outer step of a module, out of the changes of its paths
    stepfactors.py   by what a round's mean is multiplied, by its commit
    modulepart.py    one peer's part in the group of a module
    moduleheir.py    an aux peer that takes a module's steps where no trainer is left who could
    pathstate.py     what belongs to a path and survives its peer: inner optimizer, early stopping
    pathkeeping.py   … kept by others, and fetched from them
    pathfeed.py      batches of a path's documents
    pathtrainer.py   a peer's loop: take a phase, train it, hand its change to the modules
    pathhost.py      what a host or an aux peer does: the book, kept states, a helper and heir in each module's group
    evaluating.py    losses per path, by router, re-routed on the way
    pathmodel.py     inference with the modules that a text needs
"""
