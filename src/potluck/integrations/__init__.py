"""At home in people's own training code: a few changed lines, and a framework's trainer trains with others.

    lightning/       `PotluckStrategy`, for Lightning's Trainer; `strategy="potluck"` by name
    transformers.py  `PotluckCallback`, for the Trainer of Hugging Face

Both are thin layers over `potluck.Optimizer` and `potluck.DiLoCo`, and share what lies between:

    trainerpart.py   a trainer's part in a run, from joining to leaving: what the two have in common
    samples.py       how many samples a step is of
    openrun.py       which run: by its link, by the environment, or one of this program's own
    embeddedrun.py   a run inside of a program: hub and guard, for as long as it trains
    algorithms.py    from an algorithm's name and options to an optimizer
    runoptimizer.py  a torch optimizer that becomes the run's when training begins
    schedules.py     learning rates by epochs of the run, whatever the framework counts in
    naming.py        hivemind's names for our options, and those of its options that mean nothing here
    extras.py        says which extra to install where a framework is missing

Nothing here is imported by the rest of Potluck, and no framework before it is asked for.
"""
