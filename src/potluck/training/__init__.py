"""A run from its manifest: what everybody trains, and how one peer does its part.

participant.py one peer that trains, from the manifest to the samples handed in; events for the program that shows it

manifest/      what a run trains and how: run.toml, the signed manifest, the organiser's orders
trainer/       one peer's training: model, data, batch size, the loop, how it ends
books/         what the coordinator writes down: shards, contributions, receipts, history, names
"""
