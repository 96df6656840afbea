"""The nats-server that `potluck host` starts: what it is made of, and that there is one per folder.

embedded.py      EmbeddedHub: started, watched, stopped
configuration.py, certificate.py, ports.py, folderlock.py   from a folder to a configuration
process.py, launcher.py                                     the process, which ends with its parent
supervisor.py, restarts.py, diskspace.py                    what is done when it dies, or when its disk is full
"""
