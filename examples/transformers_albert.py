"""ALBERT, trained from scratch together with others by the Trainer of Hugging Face, as sahajBERT was.

    pip install 'potluck-train[transformers]'
    python examples/transformers_albert.py                # starts a run, and prints the link for others
    POTLUCK_LINK='potluck://…' python examples/transformers_albert.py   # a second peer, here or anywhere
    python examples/transformers_albert.py --dataset wikitext --name wikitext-103-v1

Masked language modelling and sentence order (AlbertForPreTraining) with LAMB, byte by byte. The text is the
documentation in Python's own standard library, or any `datasets` path, local or not, with a column "text".
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AlbertConfig, AlbertForPreTraining, Trainer, TrainingArguments, get_linear_schedule_with_warmup

from potluck.integrations.transformers import PotluckCallback
from potluck.optim.lamb import Lamb

PAD, CLS, SEP, MASK, FIRST_BYTE = range(5)
VOCABULARY = FIRST_BYTE + 256
LENGTH = 64  # of a sample, in tokens
MASKED_SHARE = 0.15
IGNORED = -100  # labels that count for nothing


def own_text() -> bytes:
    """The docstrings of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_bytes()))]
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return "\n".join(ast.get_docstring(node) or "" for node in documented).encode()


def text_of(dataset: str, name: str | None) -> bytes:
    """The column "text" of whatever `datasets` can load."""
    from datasets import load_dataset

    return "\n".join(load_dataset(dataset, name, split="train")["text"]).encode()


class TwoSegments(Dataset[dict[str, torch.Tensor]]):
    """Two neighbouring pieces of text, swapped or not, with some bytes hidden."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() + FIRST_BYTE
        self.half = (LENGTH - 3) // 2

    def __len__(self) -> int:
        return len(self.text) // (2 * self.half)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pieces = self.text[index * 2 * self.half :][: 2 * self.half].split(self.half)
        is_swapped = int(torch.randint(2, ()))
        first, second = reversed(pieces) if is_swapped else pieces
        cls, sep = torch.tensor([CLS]), torch.tensor([SEP])
        tokens = torch.cat([cls, first, sep, second, sep])
        segments = torch.cat([torch.zeros(len(first) + 2), torch.ones(len(second) + 1)]).long()
        is_hidden = (torch.rand(len(tokens)) < MASKED_SHARE) & (tokens >= FIRST_BYTE)
        return {
            "input_ids": torch.where(is_hidden, MASK, tokens),
            "token_type_ids": segments,
            "labels": torch.where(is_hidden, tokens, IGNORED),
            "sentence_order_label": torch.tensor(is_swapped),
        }


def make_model() -> AlbertForPreTraining:
    return AlbertForPreTraining(
        AlbertConfig(
            vocab_size=VOCABULARY,
            pad_token_id=PAD,
            bos_token_id=CLS,
            eos_token_id=SEP,
            embedding_size=64,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=LENGTH,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="", help="join link of a run (else POTLUCK_LINK; else a run is started)")
    parser.add_argument("--steps", type=int, default=60, help="batches that this peer computes")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--target-batch-size", type=int, default=64, help="samples of all peers that make an update")
    parser.add_argument("--dataset", default="", help="a path or name that datasets.load_dataset takes")
    parser.add_argument("--name", default=None, help="the dataset's configuration")
    options = parser.parse_args()
    data = TwoSegments(text_of(options.dataset, options.name) if options.dataset else own_text())
    model = make_model()

    together = PotluckCallback(target_batch_size=options.target_batch_size, initial_peers=options.link or None)
    with together, tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            max_grad_norm=1.0,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            data_seed=torch.seed() % 2**32,  # every peer draws in an order of its own
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            args,
            train_dataset=data,
            callbacks=[together],
            optimizers=together.optimizers(
                Lamb(model.parameters(), lr=5e-3, weight_decay=0.01),
                lambda optimizer: get_linear_schedule_with_warmup(optimizer, 5, 10_000),  # in updates of the run
            ),
        )
        result = trainer.train()
    print(f"done: loss {result.training_loss:.3f} on average", flush=True)


if __name__ == "__main__":
    main()
