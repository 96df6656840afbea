"""A language model of transformers trained by three slow peers, and by one alone for the same time.

    scripts/bench language_model [--epochs 30] [--most-seconds 900]
    scripts/bench language_model --large [--epochs 3]      # 26 M parameters: exported, and loaded by transformers alone

All by the real commands: a host with hf-causal-lm, a tokenizer that it trains itself, texts that it serves; peers that
have nothing but the link, each held to two thirds of a core. Prints the held-out loss of both runs as JSON.
`share_of_cores` is the processor time that peers had of what they were allowed; `share_of_computing` are the tokens of
three peers, against three times those of the one that is alone and waits for nobody; `share_of_waiting` is how much of
its time each peer's training waited for exchanges. `host_cpu_seconds` and
`others_cpu_seconds` (all that is no process of ours) say what else took the cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import harness
from potluck.recipes.catalogue import open_recipe
from potluck.recipes.recipe import data_of
from potluck.recipes.shipped import folder_files
from potluck.state.backups import Backups
from potluck.training.manifest.runfile import manifest_of, read_run_file
from potluck.training.trainer.models import load, untrained

SHARE = 2 / 3  # of a core
LOOK_SECONDS = 0.05
TEXT_BYTES = 6_000_000
CONTEXT, BATCH = 64, 4
RUN = """
name = "{name}"
recipe = "hf-causal-lm"
[model]
architecture = "llama"
vocabulary = {vocabulary}
context = {context}
shards = 64
held_out = 0.02
evaluation_samples = 128
[model.config]
hidden_size = {width}
intermediate_size = {hidden}
num_hidden_layers = {layers}
num_attention_heads = {heads}
tie_word_embeddings = true
[data]
files = "texts.jsonl"
[training]
algorithm = "diloco"
inner_steps = 10
outer_momentum = {momentum}
overlap_steps = {overlap}
keep_overlap_work = true
grace_seconds = 20.0
[optimizer]
learning_rate = 2e-3
decay_vectors = false
[schedule]
warmup_epochs = 3
"""

SMALL = {"vocabulary": 4096, "width": 192, "hidden": 512, "layers": 6, "heads": 6}
LARGE = {"vocabulary": 8192, "width": 512, "hidden": 1376, "layers": 7, "heads": 8}
# Nothing of Potluck: what somebody does who was given the folder.
GENERATE = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokens = tokenizer("def __init__(self", return_tensors="pt")
made = model.generate(**tokens, max_new_tokens=24, do_sample=False)
assert "potluck" not in sys.modules
print(json.dumps({
    "parameters": sum(p.numel() for p in model.parameters()),
    "missing": sorted(info["missing_keys"]), "unexpected": sorted(info["unexpected_keys"]),
    "text": tokenizer.decode(made[0]),
}))
"""


class Held:
    """A process and its children, stopped whenever they have had more than their share of a core."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.cpu_seconds = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()

    def _hold(self) -> None:
        started = time.monotonic()
        family = psutil.Process(self.process.pid)
        while not self._end.wait(LOOK_SECONDS):
            try:
                all_of_it = [family, *family.children(recursive=True)]
                self.cpu_seconds = sum(sum(each.cpu_times()[:2]) for each in all_of_it)
                ahead = self.cpu_seconds - SHARE * (time.monotonic() - started)
                if ahead > 0:
                    for each in all_of_it:
                        each.suspend()
                    self._end.wait(min(ahead / SHARE, 0.5))
                    for each in all_of_it:
                        each.resume()
            except psutil.NoSuchProcess:
                continue  # one of the children, or all of it: then `stop` follows

    def stop(self) -> None:
        """Let it go on, and leave."""
        self._end.set()
        self._thread.join()
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            os.kill(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()


def make_run(folder: Path, name: str, shape: dict[str, int], outer: dict[str, float]) -> None:
    """A run's folder: texts are the source of Python's own library."""
    folder.mkdir()
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("[a-hj-su-z]*/*.py")
    ):
        text = path.read_text("utf-8", "replace")
        texts += [json.dumps({"text": text[at : at + 2000]}) for at in range(0, len(text), 2000)]
        size += len(text)
        if size > TEXT_BYTES:
            break
    (folder / "texts.jsonl").write_text("\n".join(texts) + "\n")
    (folder / "run.toml").write_text(RUN.format(name=name, context=CONTEXT, **shape, **outer))


class Company:
    """A host and its peers."""

    def __init__(self, folder: Path, name: str, num_peers: int, size: dict[str, int], outer: dict[str, float]) -> None:
        self.folder, self.name = folder, name
        self.events: list[tuple[float, int, dict[str, Any]]] = []
        self.used_before: list[float] = []
        self.elsewhere_before: tuple[float, float] = (0.0, 0.0)
        make_run(folder / "run", name, size, outer)
        place = ["--folder", str(folder / "hub"), "--listen", "127.0.0.1", "--no-dashboard", "--backup-every", "1"]
        self.host = self._start(["host", str(folder / "run"), *place, "--json"], folder / "host-data", -1)
        link = self._until(-1, "ready")["link"]
        self.began = time.monotonic()
        self.peers = []
        for number in range(num_peers):
            options = ["--threads", "1", "--batch-size", str(BATCH), "--yes", "--json", "--hand-in-seconds", "5"]
            key = ["--identity-path", str(folder / f"{number}.nkey"), "--name", f"peer{number}"]
            self.peers.append(Held(self._start(["join", link, *options, *key], folder / f"data{number}", number)))

    def _start(self, arguments: list[str], data: Path, number: int) -> subprocess.Popen[str]:
        environment = {**os.environ, "POTLUCK_DATA": str(data), "XDG_DATA_HOME": str(data), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "potluck.cli", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{number}.log").open("w"),
            text=True,
        )
        threading.Thread(target=self._listen, args=(process, number), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str], number: int) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.events.append((time.monotonic(), number, json.loads(line)))

    def _until(self, number: int, event: str, seconds: float = 300) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _at, who, each in list(self.events):
                if who == number and each["event"] == event:
                    return each
            time.sleep(0.1)
        raise TimeoutError(f"{number} says no {event}: {(self.folder / f'{number}.log').read_text()[-2000:]}")

    def epoch(self) -> int:
        return max((each["epoch"] for _, who, each in list(self.events) if each["event"] == "progress"), default=0)

    def first_sample_seconds(self) -> float:
        found = [at for at, who, each in list(self.events) if each["event"] == "progress" and each["samples"] > 0]
        return min(found) - self.began

    def train(self, epochs: int | None, seconds: float) -> float:
        """Until so many epochs, or so long after the first sample; how long it was."""
        for number in range(len(self.peers)):
            self._until(number, "progress", 600)
        started = time.monotonic()
        self.used_before = [peer.cpu_seconds for peer in self.peers]
        self.elsewhere_before = self._elsewhere()
        while time.monotonic() - started < seconds and (epochs is None or self.epoch() < epochs):
            time.sleep(0.5)
        return time.monotonic() - started

    def _elsewhere(self) -> tuple[float, float]:
        """Processor seconds of the host, and of all that does not belong to this benchmark."""
        family = psutil.Process(self.host.pid)
        host = sum(sum(each.cpu_times()[:2]) for each in (family, *family.children(recursive=True)))
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0)
        return host, busy - host - sum(peer.cpu_seconds for peer in self.peers) - time.process_time()

    def end(self) -> dict[str, Any]:
        used = [peer.cpu_seconds - before for peer, before in zip(self.peers, self.used_before, strict=True)]
        host, others = (after - before for after, before in zip(self._elsewhere(), self.elsewhere_before, strict=True))
        samples = sum(
            max(
                (each["samples"] for _, who, each in self.events if who == n and each["event"] == "progress"), default=0
            )
            for n in range(len(self.peers))
        )
        epoch = self.epoch()
        last = [[e for _, who, e in self.events if who == n and e["event"] == "progress"][-1] for n in range(len(used))]
        for peer in self.peers:
            peer.stop()
        time.sleep(3.0)  # the host saves the newest state
        os.kill(self.host.pid, signal.SIGINT)
        self.host.wait(120)
        found = read_run_file(self.folder / "run")
        manifest = manifest_of(found, self.folder / "run")
        recipe = open_recipe(manifest.recipe, manifest.model, None, folder_files(self.folder / "run"))
        recipe.data = data_of(recipe, manifest.newest.data)
        model = untrained(recipe, manifest.seed)
        with torch.no_grad():
            before = recipe.evaluate(model.eval())["evaluation_loss"]
            restored = Backups(self.folder / "hub" / "states" / "backups", run=self.name).restore()
            assert restored is not None, "the host has no backup"
            load(model, restored.snapshot.tensors())
            after = recipe.evaluate(model.eval())["evaluation_loss"]
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "epochs": epoch,
            "saved_epoch": restored.info.epoch,
            "samples": samples,
            "cpu_seconds": [round(each, 1) for each in used],
            "host_cpu_seconds": round(host, 1),
            "others_cpu_seconds": round(others, 1),
            "share_of_waiting": [round(each["seconds_waiting"] / max(each["seconds"], 1e-9), 3) for each in last],
            "first_sample_seconds": round(self.first_sample_seconds(), 1),
            "held_out_loss_untrained": round(before, 4),
            "held_out_loss": round(after, 4),
        }

    def export(self) -> dict[str, Any]:
        """By the command, and loaded by a program that knows transformers alone."""
        target = self.folder / "export"
        command = ["checkpoint", "export", str(target), "--folder", str(self.folder / "hub"), "--format", "hf"]
        data = str(self.folder / "host-data")
        environment = {**os.environ, "POTLUCK_DATA": data, "XDG_DATA_HOME": data}
        subprocess.run([sys.executable, "-m", "potluck.cli", *command], env=environment, check=True)
        done = subprocess.run(
            [sys.executable, "-c", GENERATE, str(target)], capture_output=True, text=True, check=True, cwd=self.folder
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {**found, "files": sorted(path.name for path in target.iterdir())}


def main() -> None:
    parser = harness.parser(__doc__, repeats=None)  # and nothing outlives us
    parser.add_argument("--epochs", type=int, default=None, help="outer steps; 30, or 3 of the large model")
    parser.add_argument("--most-seconds", type=float, default=900.0)
    parser.add_argument("--momentum", type=float, default=0.5, help="of the outer step; few of them swing with more")
    parser.add_argument("--overlap", type=int, default=9, help="most local steps while an exchange is under way")
    parser.add_argument("--large", action="store_true", help="26 M parameters, three peers, and an export")
    parser.add_argument("--folder", type=Path, default=None, help="Where to work and leave the runs; else removed.")
    given = parser.parse_args()
    size, seconds = (LARGE if given.large else SMALL), given.most_seconds
    num_epochs = given.epochs or (3 if given.large else 30)
    outer = {"momentum": given.momentum, "overlap": given.overlap}
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        results: dict[str, Any] = {"load_average": os.getloadavg()}
        for name, num_peers, epochs in (("three", 3, num_epochs), ("one", 1, None)):
            if given.large and name == "one":
                continue
            (folder / name).mkdir(parents=True)
            company = Company(folder / name, name, num_peers, size, outer)
            seconds = company.train(epochs, seconds)
            figures = company.end()
            figures["seconds"] = round(seconds, 1)
            figures["tokens_per_second"] = round(figures["samples"] * CONTEXT / seconds, 1)
            figures["share_of_cores"] = round(sum(figures["cpu_seconds"]) / (num_peers * SHARE * seconds), 2)
            if given.large:
                figures["export"] = company.export()
            results[name] = figures
            print(json.dumps({name: figures}), file=sys.stderr, flush=True)
        if not given.large:
            three, one = results["three"]["tokens_per_second"], results["one"]["tokens_per_second"]
            results["share_of_computing"] = round(three / (3 * one), 2)
        print(json.dumps(results))


if __name__ == "__main__":
    main()
