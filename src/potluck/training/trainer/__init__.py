"""One peer's training.

trainer.py     the training loop: batches in, gradients or changes out to the run, until told to stop
reading.py     samples of shards, in a process of their own where reading costs something
inner.py       torch's optimizer with its parameters in groups       larc.py, muon.py: two that torch has not
program.py     potluck.join: a run as a program sees it              exporting.py: a folder for from_pretrained
optimizers.py  from the manifest to torch's optimizers and ours       models.py: the recipe's model
feed.py        batches, shard after shard                             trial.py: the recipe, tried by the host first
batchsize.py   how large a batch this machine can take                machine.py: device and memory     hours.py: when
precision.py   float32, bfloat16 or float16, by device                crew.py: several devices, one peer
sharding.py    a model that fits on none of them, in parts            evaluating.py: part of a shared evaluation
smoothed.py    the loss, read only when it is told
ownloop.py     potluck.Optimizer and potluck.DiLoCo: a program's own loop, with the settings of the run
helping.py     what aux peers do, and coordinators                    leaving.py: finished work is handed in
lineadvice.py  what a volunteer is told about a slow line
exhibit.py, viewing.py   what the run has learnt, by a checkpoint or by its newest state
"""
