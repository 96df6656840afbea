"""Tensors agreed on together: one average per epoch, whoever dies.

What others use:
    averager.py    Averager: give tensors, get their average;  outcome.py: what a peer learns of an epoch

Numbers:
    layout.py      named tensors as one flat space      chunks.py       cut into what travels in one frame
    codecs/        how a chunk is encoded               aggregators/    how a reducer makes one chunk out of many
    shares.py      who should reduce how much           partition.py    in whole chunks, by as few as are useful

Decisions (pure):
    plan.py, specs.py   the messages of a round         trigger.py, gathering.py   when to start, and with whom
    exchange.py    one member's book-keeping            director.py     the coordinator's side of one round
    attendance.py, reach.py, reassignment.py            what members say; who reduces when links break; what again
    weights.py     how much of a claimed weight counts
    adoption.py, commitment.py                          what a coordinator left complete; the record of an epoch
    audit.py, testimony.py, disputes.py, exclusions.py  who is found out, by what witnesses show, and for how long
    merkle.py, seals.py                                 what binds members to what they sent and hold

Drivers:
    participation.py, wish.py, exchanger.py, lane.py, mailroom.py, held.py, reduction.py, workers.py   a member
    messenger.py, tensorwork.py, witness.py             its words; its work, plain or sealed; its answers in an audit
    coordinator.py, convening.py, registrar.py, auditor.py   the coordinator: what it does, when a round begins, what it
                                                        writes, how it audits
    signing.py, lineage.py                              who said it; the chain of committed epochs
    milestones.py  where a member is, said aloud for tests that make it fail right there
"""
