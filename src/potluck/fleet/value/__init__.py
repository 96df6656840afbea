"""A value network that a fleet's policies pool: they share what states are worth, and nothing else.

    returns.py    GAE and V-trace (pure)
    fragment.py   what a laptop sends: observations, rewards, log-probabilities; how stale it is
    network.py    adapters by task, one trunk, PopArt heads by laptop and policy
    training.py   training a value network on fragments
    version.py    a network as it is published
    learner.py    the one that trains for everybody
    ways.py       how a laptop and the pooled network meet: through the queue, or in one process
    together.py   the way without a learner: machines train the trunk in rounds
    pooled.py     the laptop's side: advantages, the own critic, when to use which

Needs torch; `potluck.fleet` imports it only when somebody asks for it.
"""
