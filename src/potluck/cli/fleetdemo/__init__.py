"""`potluck fleet demo`: four laptops, four policies and a learner on this machine, with real commands and processes.

command.py    what a person types, and the answer
scenario.py      the play from top to bottom: who is killed, who comes back
processes.py  the host, the agents, and ways to kill a laptop, a job or the hub
record.py     what happened: the curves that the jobs logged, and the incidents (pure, but for reading files)
promises.py   what was promised, and whether it was kept (pure)
summary.py     what is told at the end: promises, and a plot of the four curves
"""
