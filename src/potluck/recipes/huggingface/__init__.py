"""Language models of the transformers library, on any text.

causal.py, masked.py   the recipes hf-causal-lm and hf-masked-lm
albert.py              hf-albert: masked tokens and the order of sentences (sentenceorder.py)
languagemodel.py       what all share: options, model, evaluation, export
mixture.py             several sources with weights as one stream
rows.py                texts of one shard: local files by ranges, data sets by their files;  held out by content
tokenizing.py          a tokenizer by name or file, or trained once by the organiser
normalising.py         what makes texts of a script alike before
tokenfiles.py          texts made into tokens once, by `potluck tokenize`
packing.py             from texts to blocks of tokens, shuffled as they stream by

transformers, datasets and tokenizers are imported when they are needed: Potluck does without them.
"""
