"""`potluck demo`: a whole collaboration on this machine, with the real commands in real processes.

command.py   what a person types, and the answer
scenario.py  the play from top to bottom: who comes, who is killed, who joins late
processes.py the processes: each a real `potluck` command, whose JSON lines are read along
observer.py  watches the run over the hub, as `potluck monitor` does, and writes down what happened
display.py   what is seen meanwhile: a live table and a line for each event
record.py    what happened, and the figures that follow from it (pure)
promises.py  what was promised, and whether it was kept (pure)
summary.py   what is told at the end: figures, promises, the model's own text, a plot
"""
