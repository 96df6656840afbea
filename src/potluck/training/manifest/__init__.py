"""What a run trains and how, signed by an organiser and followed by all.

manifest.py     Manifest: every joiner takes its arguments from here
method.py       how it trains: optimizer, schedule, algorithm, exchange, evaluation
pathspec.py     [paths]: a model of many paths
requirements.py what a volunteer needs before it can train: packages, files, consent;   shipping.py: what a run ships
tomllines.py    which line of run.toml a message is about
runfile.py      run.toml, which an organiser writes, as a manifest      skeleton.py: one to start from
noticeboard.py  the manifest in the hub: signed, checked, followed
organising.py   puts up a manifest, and later what has changed in run.toml
steering.py     the organiser's orders: pause, resume, settings (changes.py: by name), rollback; all written down
rollback.py     the coordinator's part in a rollback                    earlier.py: what a run could go back to
curriculum.py   which data count at which epoch
readiness.py    whether there is something to train on this machine, before torch is imported
"""
