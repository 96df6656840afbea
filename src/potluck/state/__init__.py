"""The run's state: kept by many, fetched from several, saved to disk, never lost.

What others use:
    keeper.py        StateKeeper: publish, fetch, resume; says when this peer deviates from the others
    config.py        StateConfig: what a peer keeps, saves and gives
    backups.py       Backups: save, restore, which to keep     uploads.py   checkpoints to somewhere else
    fetched.py       FetchedState: what a fetch gives

    keeper = StateKeeper(peer, averager, StateConfig(folder=folder))
    await keeper.start()
    fetched = await keeper.resume(timeout_seconds=600)       # at start, everybody; None: nothing is there, begin
    if fetched is not None:
        with fetched:
            fetched.write_into(tensors)                      # or fetched.tensors(), where there are none yet
    keeper.publish(tensors, {"epoch": 7, "lr": 0.1}, epoch=7)    # from the training thread: blocks for one copy …
    published = keeper.publish(tensors, {"lr": 0.1}, epoch=8, steady=tensors.keys())     # … or leaves it to a worker
    published.wait_until_copied()                            # then, before the tensors change
    with await keeper.fetch(epoch=8, base=tensors, timeout_seconds=60) as fetched:   # when left behind
        fetched.write_into(tensors)                          # only what differs is fetched and written
    keeper.deviation                                         # not None: this peer's bits differ …
    repaired = await keeper.repair(tensors, epoch=8, timeout_seconds=60)     # … and these are the others'

`publish` is called from the training thread; everything else on the event loop that the peer lives on (from another
thread by `asyncio.run_coroutine_threadsafe`). It wants the whole state by name: parameters, optimizer statistics,
buffers, of any dtype, on any device; and metadata that is the same on all peers, since it is part of the digest. What
is only this peer's has no place in it.

The state itself:
    inventory.py     tensors as one flat space, in chunks with hashes; one digest over all (pure)
    chunkpool.py     memory that is used again               snapshot.py  a copy at one moment
    publishing.py    from the training thread to a snapshot  copying.py   while training goes on

Among peers:
    announcement.py  who says to hold what, and who is believed (pure)      directory.py   says and hears it
    comparing.py     what this peer had, against what the others had        following.py   keeping without training
    appraising.py    whose values differ, where bits do                     sketch.py      … by a few numbers (pure)
    shelf.py         what this peer holds                    serving.py   gives it to others, within limits
    schedule.py      which chunk to ask which peer for (pure)   fetcher.py, source.py  asks  assembly.py   puts together
    checkedfetch.py  the state that was chosen, and whether it is what was said of it
    packing.py       chunks without loss in fewer bytes, for slow ways (pure)
    resumechoice.py  which state to go on from (pure)        resuming.py  does so
    reinstating.py   an earlier state as that of a new epoch, on purpose     handingover.py   who leaves last
    cutting.py       one group's part in the cuts of a run   cutdesk.py   the coordinator of main makes them
    returning.py     a group goes back to a cut, on purpose

On disk:
    archive.py       a peer's backups, written, announced and uploaded
    backupfile.py    one backup                              saving.py    written off the event loop
    chunklog.py      what is fetched half                    uploadtargets.py  fsspec, the Hugging Face hub
"""
