"""Write the texts of the tiny profile: the docstrings of Python's standard library, one a line.

python make_data.py .
"""

import json
import sys
from pathlib import Path

from potluck.recipes.docstrings import docstrings

LEAST_CHARACTERS = 80

folder = Path(sys.argv[1]) / "texts"
folder.mkdir(exist_ok=True)
with (folder / "docstrings.jsonl").open("w", encoding="utf-8") as file:
    for text in docstrings():
        if len(text) >= LEAST_CHARACTERS:
            file.write(json.dumps({"text": text}) + "\n")
