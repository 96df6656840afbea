"""Tensors agreed on together: one average per epoch, also when members die.

averager.py    Averager: give tensors, get their average     outcome.py: what a peer learns of an epoch
lineage.py     the chain of committed epochs

plan/          what a round is: its messages, its tensors as chunks, who reduces how much
member/        one peer's part in a round: offer, exchange, report
coordinator/   when a round begins, with which members; its repair and its commit
audit/         checks before a commit who lied
codecs/        how a chunk is encoded
aggregators/   how a reducer makes one chunk out of many
"""
