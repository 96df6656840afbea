"""What an aux peer does in all of its groups."""

from __future__ import annotations

import msgspec

from potluck.hub.keys import Signer, new_seed
from potluck.hub.stores import MANIFEST_KEY
from potluck.recipes.reference import RecipeRef
from potluck.sim.memoryrun import MemoryRun
from potluck.sim.virtualloop import LoopClock, in_virtual_time
from potluck.testing.polling import poll_until
from potluck.training.manifest import noticeboard
from potluck.training.manifest.manifest import Manifest, Patience
from potluck.training.trainer.auxiliarywork import AuxiliaryWork


@in_virtual_time
async def test_it_waits_for_states_as_the_manifest_says_in_each_group() -> None:
    run = MemoryRun(clock=LoopClock())
    await run.open()
    ada = Signer(new_seed("user"))
    store = run.hub.connect("GUARD").store("manifest")
    manifest = Manifest(run=run.hub.subjects.run, recipe=RecipeRef(name="digits"), patience=Patience(load_seconds=8.0))
    await store.put(MANIFEST_KEY, noticeboard.sign(manifest, ada))
    work = await AuxiliaryWork.start(await run.join("Alan", role="aux", groups=("main", "cakes")))

    def waits() -> list[float]:
        return [helper._follower.load_seconds for helper in work.helpers]

    assert waits() == [8.0, 8.0]
    patient = Patience(load_seconds=9.0)
    later = msgspec.structs.replace(manifest, patience=patient, revision=manifest.revision + 1)
    await store.put(MANIFEST_KEY, noticeboard.sign(later, ada))
    await poll_until(lambda: waits() == [9.0, 9.0], 10.0, "the newer manifest")
    await work.close()
    await run.close()
