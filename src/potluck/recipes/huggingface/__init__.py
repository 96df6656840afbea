"""Language models of the transformers library, on any text.

causal.py, masked.py   the recipes hf-causal-lm and hf-masked-lm
languagemodel.py       what both share: options, model, evaluation, export
rows.py                texts of one shard: local files by ranges, data sets by their files;  held out by content
tokenizing.py          a tokenizer by name or file, or trained once by the organiser
packing.py             from texts to blocks of tokens, shuffled as they stream by

transformers, datasets and tokenizers are imported when they are needed: Potluck does without them.
"""
