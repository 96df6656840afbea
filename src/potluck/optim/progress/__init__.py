"""How far the run is towards its next epoch.

tracker.py         the coordinator's books (pure): samples out of beacons, and when there will be enough
pace.py            one peer's own pace (pure), and whether another step is worth it
progresskeeper.py  the driver: beacons out, the coordinator's messages in
"""
