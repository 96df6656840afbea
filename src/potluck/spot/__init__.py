"""A run on rented machines that may be taken away: so many workers and aux peers, kept at that number.

tiers.py        slots: what each machine is for, and the speed of its line (pure)
supervision.py  which machines to start and end, so that every slot has one (pure)
provider.py     what a provider of machines can do; aws.py and local.py do it
preemption.py   when machines come and go: real logs, and a generator fitted to them (pure)
runner.py       watches and mends until told to stop
notice.py       the two minutes' notice of a spot machine, as a request to leave
"""
