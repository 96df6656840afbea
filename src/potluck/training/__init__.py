"""A run from its manifest: what everybody trains, and how one peer does its part.

manifest.py    Manifest: what a run trains and how; signed by an organiser, kept in the hub, followed by all
runfile.py     run.toml, which an organiser writes, as a manifest; skeleton.py: one to start from
notice.py      the manifest in the hub: signed, checked, followed
steering.py    the organiser's hand: pause, resume, settings (changes.py: by name), rollback; all written down
earlier.py     what a run could go back to, and who has it
organising.py  putting up a manifest, and later what has changed in run.toml
restoring.py   the coordinator's part in a rollback
optimizers.py  from the manifest to torch's optimizers and ours
curriculum.py  which data count at which epoch         trial.py: the recipe, tried before others have to
models.py      the recipe's model: untrained, or with a run's state, and what it does
exhibit.py     what a run has learnt, by its checkpoint
batchsize.py   how large a batch this machine can take    machine.py: its cores and memory    hours.py: when
ledger.py      who trains on which shard (pure); shards.py: asked of the coordinator, by links
feed.py        batches, shard after shard
readiness.py   whether there is something to train here, before torch is imported
trainer.py     one peer's training loop               helping.py: what aux peers do, and coordinators
ownloop.py     potluck.Optimizer and potluck.DiLoCo: a program's own loop, with the settings of the run
leaving.py     how it ends: what is done is handed in
viewing.py     the run's newest state, for whoever only looks
contributions.py  who has given how much               receipts.py: the coordinator's signed word for it
commitdesk.py  what these two share: a queue of commits
history.py     how the run has gone (pure); historydesk.py: written down by the coordinator
ballot.py      names for the model, and votes
"""
