"""What the coordinator of a run writes down.

shardbook.py      who trains on which shard (pure)            shards.py: asked of the coordinator, by links
contributions.py  who has given how much                      receipts.py: the coordinator's signature for it
commitdesk.py     what these two share: a queue of commits
history.py        how the run has gone (pure)                 historydesk.py: written down by the coordinator
evaluations.py    what trusted trainers found in held-out data, part by part
lossband.py       whether a held-out loss is like those before (pure)
ballot.py         names for the model, and votes
"""
