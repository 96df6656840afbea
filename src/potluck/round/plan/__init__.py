"""What a round is, for all of its members (pure).

messages.py     the messages of a round: ready, plan, report, commit      specs.py: codecs, starts
layout.py       named tensors as one flat space                           chunks.py: cut into what travels in one frame
shares.py       who should reduce how much                                partition.py: in whole chunks
weights.py      how much of a claimed weight counts
signing.py      plans, aborts and commits carry the coordinator's signature
"""
