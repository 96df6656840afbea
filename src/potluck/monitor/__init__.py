"""Watching a run: what its beacons, its roster and its lineage say, put together.

view.py      RunView: the run as it is now (pure)
alarms.py    what is wrong with it, and what to do (pure); cutalarm.py: whether cuts become safe
watcher.py   follows a run over the hub, and keeps a view of it
past.py      how the run has gone (pure); series.py: a million points as a few hundred
pathview.py  paths and modules: who trains what (pure)
pipelinenews.py  what a pipeline's conductor reports;  flowpicture.py: a picture of its stages
follower.py  follows all that a page shows: the run now, its past, the manifest, who gave how much
evaluating.py  held-out loss: the best state is kept, what leaves the band is rolled back
fleetnews.py what a fleet's machines report
fleetqueues.py  a fleet's queues and pooled value network over time, as an organiser sees them
figures.py   numbers as people read them
exporters.py the figures for TensorBoard and Weights & Biases
previews.py  what the model says, out of the host's backups; rests.py: between its passes, for the machine's other work
dashboard/   the run in a browser
lossplot.py  the loss as a PNG
"""
