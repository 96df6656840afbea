"""Watching a run: what its beacons, its roster and its lineage say, put together.

view.py    RunView: the run as it is now (pure)
alarms.py  what is wrong with it, and what to do (pure)
watcher.py follows a run over the hub, and keeps a view of it
lossplot.py  the loss as a PNG
"""
