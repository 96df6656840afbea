"""What a checkpoint is worth: named entities (NER) and news category (NCC), each learned on top of it.

    potluck checkpoint export model --run sahajbert --format hf
    python downstream.py model --task ncc                   # with the constants of the public run
    python downstream.py model --task ner --tiny            # on the labelled sentences of make_data.py
    python downstream.py model --task ncc --tiny --untrained     # the same without what the run has learned

Constants: learning rate 1e-5, 128 tokens, 20 passes, batches of 128, ends when 3 passes gain less than 0.01.
"""

import argparse
import copy
import json
from pathlib import Path

import torch
from torch.nn import functional

IGNORED = -100
SETS = {"ner": ("wikiann", "bn"), "ncc": ("indic_glue", "sna.bn")}
LEARNING_RATE, LENGTH, PASSES, BATCH, PATIENCE, LEAST_GAIN = 1e-5, 128, 20, 128, 3, 0.01


def rows_of(arguments):
    """Words with tags, or with one label; those to learn from, and those to be asked about."""
    if not arguments.tiny:
        from datasets import load_dataset

        name, subset = SETS[arguments.task]
        found = load_dataset(name, subset)
        if arguments.task == "ner":
            return [[(row["tokens"], row["ner_tags"]) for row in found[split]] for split in ("train", "validation")]
        return [[(row["text"].split(), row["label"]) for row in found[split]] for split in ("train", "validation")]
    rows = [json.loads(line) for line in arguments.data.read_text(encoding="utf-8").splitlines()]
    key = "tags" if arguments.task == "ner" else "topic"
    names = sorted({name for row in rows for name in (row[key] if key == "tags" else [row[key]])})
    number = {name: place for place, name in enumerate(names)}
    labelled = [
        (row["words"], [number[tag] for tag in row["tags"]] if key == "tags" else number[row["topic"]]) for row in rows
    ]
    return labelled[: arguments.learned], labelled[-200:]


def encoded(rows, tokenizer, length):
    """Tokens, which are there, and labels: of the first piece of each word, or of the whole."""
    tokens, there, labels = [], [], []
    for words, label in rows:
        pieces = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
        row = [tokenizer.cls_token_id, *(piece for each in pieces for piece in each)][: length - 1]
        row.append(tokenizer.sep_token_id)
        if isinstance(label, list):
            marks = [IGNORED]
            for each, tag in zip(pieces, label, strict=True):
                marks += [tag, *[IGNORED] * (len(each) - 1)] if each else []
            marks = [*marks[: length - 1], IGNORED]
            labels.append(marks + [IGNORED] * (length - len(marks)))
        else:
            labels.append(label)
        there.append([1] * len(row) + [0] * (length - len(row)))
        tokens.append(row + [tokenizer.pad_token_id] * (length - len(row)))
    return torch.tensor(tokens), torch.tensor(there), torch.tensor(labels)


def right_of(model, data):
    """The share of labels that are right; for entities, of those words that are one."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for part in zip(*(each.split(64) for each in data), strict=True):
            guessed = model(input_ids=part[0], attention_mask=part[1]).logits.argmax(-1)
            counts = (
                (part[2] != IGNORED) & (part[2] != outside) if part[2].dim() > 1 else torch.ones_like(part[2]).bool()
            )
            right += int(((guessed == part[2]) & counts).sum())
            total += int(counts.sum())
    return right / max(total, 1)


def main():
    global outside
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder that `potluck checkpoint export --format hf` wrote")
    parser.add_argument("--task", choices=sorted(SETS), required=True)
    parser.add_argument("--tiny", action="store_true", help="our own labelled sentences")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "downstream.jsonl")
    parser.add_argument("--learned", type=int, default=200, help="tiny: sentences to learn from")
    parser.add_argument("--untrained", action="store_true", help="the same model with new values, to compare with")
    arguments = parser.parse_args()
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
    )

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    learned, asked = rows_of(arguments)
    length, batch, rate = (48, 16, 1e-3) if arguments.tiny else (LENGTH, BATCH, LEARNING_RATE)
    kinds = {label for _, row in learned + asked for label in (row if isinstance(row, list) else [row])}
    tags = [label for _, row in learned if isinstance(row, list) for label in row]
    outside = max(set(tags), key=tags.count) if tags else IGNORED  # most words are no entity
    auto = AutoModelForTokenClassification if arguments.task == "ner" else AutoModelForSequenceClassification
    config = AutoConfig.from_pretrained(arguments.model, num_labels=len(kinds))
    model = auto.from_config(config) if arguments.untrained else auto.from_pretrained(arguments.model, config=config)
    data, held = encoded(learned, tokenizer, length), encoded(asked, tokenizer, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    best, best_state, since = 0.0, None, 0
    passes = 0
    while passes < PASSES and since < PATIENCE:
        passes += 1
        model.train()
        for places in torch.randperm(len(learned)).split(batch):
            logits = model(input_ids=data[0][places], attention_mask=data[1][places]).logits
            loss = functional.cross_entropy(logits.flatten(0, -2), data[2][places].flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = right_of(model, held)
        since = 0 if found > best + LEAST_GAIN else since + 1
        if found > best:
            best, best_state = found, copy.deepcopy(model.state_dict())
    assert best_state is not None, "nothing was learned at all"
    print(json.dumps({"task": arguments.task, "right": best, "passes": passes, "untrained": arguments.untrained}))


if __name__ == "__main__":
    main()
