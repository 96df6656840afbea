"""Who may take part: the records, and the messages between members and the guard.

member.py        members, bans, requests for access, the run's policy      invite.py: secrets that let people in
application.py   asking to be let in, and the answer
organise.py      what organisers ask of the guard, from their side         queueing.py: what members ask about queues
"""
