"""What a fleet shall run: from fleet.toml to a signed document that machines go by.

fleetfile.py   fleet.toml, read and checked
job.py         a job on a machine, and what the machine's owner allows
placement.py   which machine a job goes to
sealing.py     secrets that only one machine can open
parcels.py     files and images by digest, which machines fetch over links
desired.py     all jobs in one document, signed by an organiser
machine.py     what a machine reports: what it has, how its jobs are
machinelinks.py  links from the organiser to machines: logs and files
control.py     the organiser's side: up, down, restart, logs
"""
