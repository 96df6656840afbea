"""Taking part in a run, whole: what a command or a notebook starts.

joined.py      `potluck.join`: a run in a synchronous program, with a thread for the event loop (loopthread.py)
calls.py       what one thread waits for and another does; Ctrl-C harms neither
peer.py        a peer: admission, session, links, reachability, measured speeds
group.py       a group of the run as this peer takes part in it: what rounds and states stand on
cuts.py        one committed epoch of each group, for programs;  cutboard.py  what the hub has about them
reachable.py   keeps true where others can reach it
speedtest.py   how fast bytes go to another peer and come back
runcheck.py    the way into a run, checked by going it
host.py        a host: hub, guard, and an aux peer of its own
linknews.py    what a peer tells of its links
hostnews.py    what a host tells everybody of its own troubles
hostrecord.py  where the hub is, for commands on the host's machine
wheel.py, fileserver.py  this very Potluck as a wheel; a host's HTTP server for it and for what its run ships
"""
