"""One peer's training.

trainer.py     the training loop: batches in, gradients or changes out to the run, until told to stop
optimizers.py  from the manifest to torch's optimizers and ours       models.py: the recipe's model
feed.py        batches, shard after shard                             trial.py: the recipe, tried by the host first
batchsize.py   how large a batch this machine can take                machine.py: device and memory     hours.py: when
ownloop.py     potluck.Optimizer and potluck.DiLoCo: a program's own loop, with the settings of the run
helping.py     what aux peers do, and coordinators                    leaving.py: finished work is handed in
exhibit.py, viewing.py   what the run has learnt, by a checkpoint or by its newest state
"""
