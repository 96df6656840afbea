"""A machine of a fleet: keeps jobs running.

agent.py       follows the document, and acts
reconciler.py  from what shall run and what runs to what has to be done (pure)
jobfolder.py   a job's folder on the machine
runners/       processes and containers behind one interface
reporting.py   what the agent reports about its machine and jobs
desk.py        logs and files for organisers, over links
service.py     the agent as a systemd unit
"""
