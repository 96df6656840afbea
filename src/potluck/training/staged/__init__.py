"""A pipeline as a hosted run: what the manifest says, carried out by `potluck.pipeline`.

part.py      one peer's part: it follows the lease, enlists, serves, feeds, listens, saves, conducts
hosting.py   what a host does in it
data.py      the run's data in one order, whatever the shape: passes over shards, and where each step begins
course.py    what the manifest says about a step: micro-batches, clipping, pauses, the optimizer of a unit
overview.py  what a conductor tells all who look
previews.py  what the model says and is worth, out of the host's cuts
heldout.py   the recipe's own figures, with its loss computed by the pipeline
whole.py     the whole model out of a cut, for export, evaluation and previews
"""
