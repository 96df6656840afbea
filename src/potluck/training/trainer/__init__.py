"""One peer's training.

trainer.py        the training loop: batches in, gradients or changes out to the run, until told to stop
config.py         how this machine trains                               computing.py: the model on its devices
optimizers.py     from the manifest to torch's optimizers and ours      inneroptimizer.py: torch's, in groups
larc.py, muon.py  two optimizers that torch has not                     models.py: the recipe's model
feed.py           batches, shard after shard                            reading.py: samples, read in another process
batchsize.py      how large a batch this machine can take               machine.py: device and memory
precision.py      float32, bfloat16 or float16, by device               devicepool.py: several devices, one peer
sharding.py       a model that fits on none of them, in parts           evaluating.py: part of a shared evaluation
smoothed.py       the loss, read only when it is told                   trial.py: the recipe, tried by the host first
leaving.py        the last samples are handed in                        hours.py: when this machine may train
ownloop.py        potluck.Optimizer and potluck.DiLoCo: a program's own loop, with the settings of the run
program.py        potluck.join: a run as a program sees it              exporting.py: a folder for from_pretrained
auxiliarywork.py  what aux peers do, and coordinators                   lineadvice.py: advice about a slow line
pathwork.py       a peer that trains paths, and their host              pathuse.py: what an organiser does with paths
tuning.py         what suits this machine, by trial
resultpreview.py, viewing.py   what the run has learnt, by a checkpoint or by its newest state
"""
