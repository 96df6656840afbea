"""The `potluck` command: one file per group of commands.

    __main__.py  where it begins     main.py      the frame: help, version, exit codes, errors in plain words
    console.py   how answers look: tables for people, JSON for programs, Ctrl-C that leaves cleanly
    host.py      start a run; hosting.py: what goes on while it is open; hostrecipe.py: what it is to train
    join.py      join, train, aux: take part in one (takingpart.py, training.py)
    options.py   what several commands can be told; optiongroups.py: those that belong together
    run.py       steer one: pause, resume, settings, rollback, and the log of all that
    visualize.py, checkpoint.py, receipts.py   what came of it     download.py   what a recipe needs
    tune.py      what suits this machine          tokenize.py  texts made into tokens, once
    elsewhere.py options that other systems have, and what does the same here
    members.py   who may take part  doctor.py   what is wrong here
    monitor.py, leaderboard.py, dashboard.py (a host's: dashboardchild.py)   what members see
    vote.py      a name for the model
    joining.py   from the link to a peer in the run: preflight.py, requirements.py, loading.py
    staged.py    join in a pipeline    pipeline.py, plan.py   look at one, plan one
    paths.py     runs with paths       pathrerouting.py       a new routing for one that trains
    lending.py   fleet host and agent  queue.py               a fleet's queues
    spot.py      rented machines       init.py, folders.py    a run's files
    demo/        a whole collaboration on this machine
    fleetdemo/   a whole fleet on this machine

Only `main.py` is imported to print the help; a command imports what it needs when it runs.
"""
