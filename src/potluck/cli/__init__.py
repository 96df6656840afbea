"""The `potluck` command: one file per group of commands.

    main.py      the frame: help, version, exit codes, errors in plain words
    console.py   how answers look: tables for people, JSON for programs, Ctrl-C that leaves cleanly
    host.py      start a run        join.py     take part in one
    run.py       steer one: pause, resume, settings, rollback, and the log of all that
    members.py   who may take part  doctor.py   what is wrong here
    demo/        a whole collaboration on this machine

Only `main.py` is imported to print the help; a command imports what it needs when it runs.
"""
